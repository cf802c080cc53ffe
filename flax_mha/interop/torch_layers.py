"""Conversion of `torch.nn` layers, which needs no PyTorch.

>>> module, variables = from_torch(layer.state_dict(), num_heads=8)
>>> layer.load_state_dict({k: torch.tensor(x) for k, x in to_torch(module, variables).items()})
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks, trees
from flax_mha.interop import table
from flax_mha.layer.qk_norm import layer_norm
from flax_mha.layer.settings import unhandled
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, Encoder
from flax_mha.models.blocks import Block, DecoderBlock, EncoderBlock
from flax_mha.models.feed_forward import Activation
from flax_mha.models.stacks import Stack

Module: TypeAlias = MultiHeadAttention | Block | Stack

# The prefix of the first attention layer: in a stack, in a block, by itself.
_FIRST = ("layers.0.self_attn.", "self_attn.", "")
# Fields that torch.nn supports or no state dict has.
_BLOCK = (
    "attention", "mlp_dim", "norm", "activation", "dropout_rate", "remat", "norm_epsilon",
    "cross_attention", "mlp_bias",
)  # fmt: skip
_STACK = ("num_layers", "block", "final_norm")


def from_torch(
    state_dict: Mapping[str, Any], num_heads: int, *, norm_first: bool = False,
    activation: str | Activation = "relu", layer_norm_eps: float = 1e-5, dropout: float = 0.0,
) -> tuple[Module, dict[str, Any]]:  # fmt: skip
    """Return a module and its variables from a state dict of `torch.nn`.

    It is a `MultiheadAttention`, a `TransformerEncoderLayer` or `TransformerDecoderLayer`, or a
    stack of these. The batch comes first. Masks are arguments of the call, where True lets a query
    see a key. Decoders are causal. `add_zero_attn`, which no state dict shows, is not supported.

    Args:
      state_dict: the arrays by name, PyTorch's tensors or others.
      num_heads: N, the number of heads.
      norm_first: PyTorch's option of blocks, like the next three.
      activation: "relu", "gelu" (the exact one), or a function.
      layer_norm_eps: the norms' epsilon.
      dropout: the dropout rate (PyTorch's default in blocks: 0.1).

    Raises:
      ValueError: if the state dict belongs to another layer, or has `bias_k` and `bias_v`.
    """
    tensors = {name: array(x) for name, x in state_dict.items()}
    prefix = next((prefix for prefix in _FIRST if f"{prefix}out_proj.weight" in tensors), None)
    if prefix is None:
        raise ValueError(
            f"state_dict must be of one attention layer, block or stack of torch.nn, got "
            f"{sorted(tensors)[:4]} …; remove the prefix of the layer's names, and convert the "
            f"encoder and the decoder of nn.Transformer one by one"
        )
    biased = f"{prefix}out_proj.bias" in tensors
    layer = MultiHeadAttention(num_heads, use_bias=biased, dropout_rate=dropout)
    module: Module = layer
    sizes = [len(tensors[f"{prefix}out_proj.weight"])]
    if not prefix:
        sizes += [x.shape[1] for name, x in tensors.items() if name[1:] == "_proj_weight"][1:]
    else:
        first = prefix.removesuffix("self_attn.")
        is_decoder = f"{first}multihead_attn.out_proj.weight" in tensors
        options: dict[str, Any] = {"cross_attention": layer.copy()} if is_decoder else {}
        sizes *= 1 + is_decoder
        block = (DecoderBlock if is_decoder else EncoderBlock)(
            layer, len(tensors[f"{first}linear1.weight"]), pre_norm=norm_first,
            activation="gelu_exact" if activation == "gelu" else activation,
            norm="layernorm" if biased else layer_norm(layer_norm_eps, use_bias=False),
            norm_epsilon=layer_norm_eps, dropout_rate=dropout, **options,
        )  # fmt: skip
        module = block
        if first:
            count = 1 + max(int(x.split(".")[1]) for x in tensors if x.startswith("layers."))
            stack = Decoder if is_decoder else Encoder
            module = stack(count, block, final_norm="norm.weight" in tensors)
    if dropout:  # `init` has no key for dropout.
        return module, from_torch(state_dict, num_heads)[1]
    example = tuple(np.zeros((1, 1, D), np.float32) for D in sizes)
    rows = _rows(module, "q_proj_weight" in tensors)
    return module, table.from_tensors(table.Family(module, example, rows), tensors)


def to_torch(module: Module, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the state dict of an attention layer, a block or a stack for `torch.nn`.

    This is the inverse of `from_torch`. A state dict has no masks, dropout rates or options.

    Raises:
      ValueError: if `torch.nn` lacks an option of the module, such as rotary.
      TypeError: if the module is of another type.
    """
    layer = _check(module)
    kernels = [
        x.shape[0] for path, x in trees.parameters_by_path(variables).items()
        if path in ("query/kernel", "key/kernel", "value/kernel")
    ]  # fmt: skip
    family = table.Family(module, (), _rows(module, len({*kernels}) > 1))
    tensors = table.to_tensors(family, variables)
    check_sizes("torch.nn", lambda: from_torch(tensors, layer.num_heads))
    return tensors


def check_sizes(library: str, read: Callable[[], Any]) -> None:
    """Check that a layer's tensors can be read back."""
    try:
        read()
    except ValueError as error:
        raise ValueError(
            f"module must have sizes and biases that {library} supports, got an error: {error}"
        ) from None


def _check(module: Any) -> MultiHeadAttention:
    """Check that torch.nn would compute the same as a module, and return its attention layer."""
    if isinstance(module, Stack):
        refuse(module, checks.unhandled(module, _STACK))
        if not isinstance(module.block, Block):
            refuse(module, {"block": module.block})
        return _check(module.block)
    if isinstance(module, Block):
        if module.norm != "layernorm" and not isinstance(module.norm, nn.LayerNorm):
            refuse(module, {"norm": module.norm})
        known = (*_BLOCK, "pre_norm") if isinstance(module.pre_norm, bool) else _BLOCK
        refuse(module, checks.unhandled(module, known))
        if getattr(module, "cross_attention", None) is not None:
            _check(module.cross_attention)
        return _check(module.attention)
    if not isinstance(module, MultiHeadAttention):
        raise TypeError(
            f"module must be an attention layer, a block or a stack, got "
            f"{checks.describe(module)}; give one of these"
        )
    if not isinstance(module.use_bias, bool):
        refuse(module, {"use_bias": module.use_bias})
    check_layer(module)
    return module


def check_layer(layer: Any, library: str = "torch.nn", options: Sequence[str] = ()) -> None:
    """Check that a library has layers that compute the same, with these fields as options."""
    if type(layer).compute is not MultiHeadAttention.compute:
        raise ValueError(
            f"{library} has no {type(layer).__name__}; give a flax_mha.MultiHeadAttention"
        )
    refuse(layer, unhandled(layer, options), library)


def refuse(module: Any, fields: Mapping[str, Any], library: str = "torch.nn") -> None:
    """Raise an error that names a field, if there is one."""
    for name, value in fields.items():
        raise ValueError(
            f"{library} has no {type(module).__name__} with {name}, got "
            f"{checks.describe(value)}; leave it out"
        )


def _rows(module: Module, separate: bool) -> list[table.TensorRule]:
    """Return the rules of a module, whose q, k and v have separate kernels or one."""
    theirs, ours = ("layers.{}.", "layers_{}/") if isinstance(module, Stack) else ("", "")
    layers = {"self_attn": "attention"}
    if isinstance(module, MultiHeadAttention):
        layers = {"": ""}
    elif isinstance(module, DecoderBlock | Decoder):
        layers |= {"multihead_attn": "cross_attention"}
    rows: list[table.TensorRule] = []
    for name, layer in layers.items():
        leaves = ("weight", "bias")
        rows += table.attention(theirs + name, ours + layer, table.TORCH_HEADS, leaves=leaves)
    if separate:  # The biases are still one tensor.
        rows[:1] = [
            table.TensorRule(f"{x[0]}_proj_weight", f"{x}/kernel", table.transposed())
            for x in table.PROJECTIONS[:3]
        ]
    if isinstance(module, MultiHeadAttention):
        return rows
    names = {f"norm{i}": f"{name}_norm" for i, name in enumerate([*layers.values(), "mlp"], 1)}
    names |= {"linear1": "mlp/up", "linear2": "mlp/down"}
    rows += table.parts(theirs[:-1], ours[:-1], names)
    if isinstance(module, Stack):
        rows = table.per_layer(module.num_layers, rows) + table.norm("norm", "norm")
    return rows


def array(x: Any) -> np.ndarray:
    """Return a NumPy array of the same dtype, bfloat16 included."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":
            return np.asarray(x.float()).astype(jnp.bfloat16)
    return np.asarray(x)
