"""Conversion of `torch.nn` layers, which needs no PyTorch.

>>> module, variables = from_torch(layer.state_dict(), num_heads=8)
>>> layer.load_state_dict({k: torch.tensor(x) for k, x in to_torch(module, variables).items()})
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks, trees
from flax_mha.interop import table
from flax_mha.layer.qk_norm import layer_norm
from flax_mha.layer.settings import has_bias, unhandled
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, Encoder
from flax_mha.models.blocks import Block, DecoderBlock, EncoderBlock
from flax_mha.models.feed_forward import Activation
from flax_mha.models.stacks import Stack

Module: TypeAlias = MultiHeadAttention | Block | Stack

_INPUTS = table.PROJECTIONS[:3]
# The prefix of the first attention layer: in a stack, in a block, by itself.
_FIRST = ("layers.0.self_attn.", "self_attn.", "")
# Fields of blocks and stacks that torch.nn supports or no state dict has.
_BLOCK = (
    "attention", "mlp_dim", "norm", "activation", "dropout_rate", "remat", "norm_epsilon",
    "cross_attention",
)  # fmt: skip
_STACK = ("num_layers", "block", "final_norm")


def from_torch(
    state_dict: Mapping[str, Any], num_heads: int, *, norm_first: bool = False,
    activation: str | Activation = "relu", layer_norm_eps: float = 1e-5, dropout: float = 0.0,
) -> tuple[Module, dict[str, Any]]:  # fmt: skip
    """Return a module and its variables from a state dict of `torch.nn`.

    Supported are `MultiheadAttention`, `TransformerEncoderLayer`, `TransformerDecoderLayer` and
    stacks of them. The batch comes first. Masks are arguments of the call, where True lets a query
    see a key. Decoders are causal. A state dict has no options: give those that differ from the
    defaults.

    Args:
      state_dict: the arrays by name, PyTorch's tensors or others.
      num_heads: N, the number of heads.
      norm_first: PyTorch's option of blocks.
      activation: PyTorch's option of blocks, where "gelu" is exact; or a function.
      layer_norm_eps: PyTorch's option of blocks.
      dropout: PyTorch's option, whose default there is 0.1 in blocks.

    Raises:
      TypeError: if `state_dict` is no mapping, such as a module.
      ValueError: if the state dict belongs to another layer, or has `bias_k` and `bias_v`. A state
        dict does not show `add_zero_attn`, which is not supported.
    """
    checks.positive(num_heads=num_heads)
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict must map names to arrays, got a {type(state_dict).__name__}; give "
            f"module.state_dict(), and the module's options as arguments"
        )
    tensors = {name: array(x) for name, x in state_dict.items()}
    prefix = next((prefix for prefix in _FIRST if f"{prefix}out_proj.weight" in tensors), None)
    if prefix is None:
        raise ValueError(
            f"state_dict must be of one attention layer, block or stack of torch.nn, got "
            f"{sorted(tensors)[:4]} …; remove the prefix of the layer's names, and convert the "
            f"encoder and the decoder of nn.Transformer one by one"
        )
    for name in tensors:
        if name.endswith(("bias_k", "bias_v")):
            raise ValueError(
                f"state_dict must be of a layer without add_bias_kv, which has no counterpart "
                f"here, got {name}; train one without it"
            )
    features = [len(tensors[f"{prefix}out_proj.weight"])]
    if features[0] % num_heads:
        raise ValueError(
            f"num_heads must divide the layer's {features[0]} features, got {num_heads}; give the "
            f"number with which the layer was made"
        )
    layer = MultiHeadAttention(
        num_heads, use_bias=f"{prefix}out_proj.bias" in tensors, dropout_rate=dropout
    )
    options = {
        "pre_norm": norm_first, "activation": "gelu_exact" if activation == "gelu" else activation,
        "norm_epsilon": layer_norm_eps, "dropout_rate": dropout,
    }  # fmt: skip
    module: Module = layer
    if prefix:
        module = _blocks(layer, tensors, prefix.removesuffix("self_attn."), options)
    if isinstance(module, DecoderBlock | Decoder):
        features *= 2
    separate = not prefix and "q_proj_weight" in tensors
    if separate:
        features += [tensors[f"{name}_proj_weight"].shape[-1] for name in "kv"]
    example = tuple(np.zeros((1, 1, D), np.float32) for D in features)
    family = table.Family(module, example, _rows(module, separate))
    if dropout:  # `init` has no key for dropout.
        return module, from_torch(state_dict, num_heads, norm_first=norm_first)[1]
    return module, table.from_tensors(family, tensors)


def _blocks(
    layer: MultiHeadAttention, tensors: Mapping[str, Any], first: str, options: dict[str, Any]
) -> Block | Stack:
    """Return a block with an attention layer, or a stack if the prefix `first` is not empty."""
    options["mlp_dim"] = len(tensors[f"{first}linear1.weight"])
    if not layer.use_bias:
        options["norm"] = layer_norm(options["norm_epsilon"], use_bias=False)
    block: Block = EncoderBlock(layer, **options)
    if f"{first}multihead_attn.out_proj.weight" in tensors:
        block = DecoderBlock(layer, **options, cross_attention=layer.copy())
    if not first:
        return block
    count = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    stack = Decoder if isinstance(block, DecoderBlock) else Encoder
    return stack(count, block, final_norm="norm.weight" in tensors)


def to_torch(module: Module, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the state dict of an attention layer, a block or a stack for `torch.nn`.

    This is the inverse of `from_torch`. A state dict has no masks, dropout rates or options.

    Raises:
      ValueError: if `torch.nn` lacks an option of the module, such as rotary, or if the variables
        are not the module's.
      TypeError: if the module is of another type.
    """
    if not isinstance(module, MultiHeadAttention | Block | Stack):
        raise TypeError(
            f"module must be an attention layer, a block or a stack, got "
            f"{checks.describe(module)}; give one of these"
        )
    _check(module)
    params = trees.parameters_by_path(variables)
    separate = False
    if isinstance(module, MultiHeadAttention):
        separate = len({params[f"{name}/kernel"].shape[0] for name in _INPUTS}) > 1
    tensors = table.to_tensors(table.Family(module, (), _rows(module, separate)), variables)
    for name, x in tensors.items():
        parts = 3 if name.endswith("in_proj_weight") else 1
        if name.endswith(("in_proj_weight", "out_proj.weight")) and len(x) != parts * x.shape[1]:
            raise ValueError(
                f"module must have as many heads of keys and values as of queries, head_dim = "
                f"features / num_heads, and no other out_features, for torch.nn, got {name} of "
                f"{x.shape}; change these fields"
            )
    return tensors


def _check(module: Any) -> None:
    """Check that torch.nn would compute the same as a module."""
    if isinstance(module, Stack):
        refuse(module, checks.unhandled(module, _STACK))
        if not isinstance(module.block, Block):
            raise ValueError(
                f"block must be one block for torch.nn, got {checks.describe(module.block)}; give "
                f"one"
            )
        _check(module.block)
    elif isinstance(module, Block):
        pre_norm = ("pre_norm",) if isinstance(module.pre_norm, bool) else ()
        biased = has_bias(module.attention.use_bias, "out")
        mlp_bias = ("mlp_bias",) if module.mlp_bias == biased else ()
        refuse(module, checks.unhandled(module, (*_BLOCK, *pre_norm, *mlp_bias)))
        if module.norm != "layernorm" and not isinstance(module.norm, nn.LayerNorm):
            raise ValueError(
                f"norm must be a LayerNorm for torch.nn, got {module.norm!r}; give 'layernorm'"
            )
        _check(module.attention)
        if isinstance(module, DecoderBlock) and module.cross_attention is not None:
            _check(module.cross_attention)
    else:
        check_layer(module)
        if len({has_bias(module.use_bias, name) for name in table.PROJECTIONS}) > 1:
            refuse(module, {"use_bias": module.use_bias})


def check_layer(layer: Any, library: str = "torch.nn") -> None:
    """Check that a library has layers that compute the same as an attention layer."""
    if type(layer).compute is not MultiHeadAttention.compute:
        raise ValueError(
            f"{library} has no {type(layer).__name__}; give a flax_mha.MultiHeadAttention"
        )
    refuse(layer, unhandled(layer), library)


def refuse(module: Any, fields: Mapping[str, Any], library: str = "torch.nn") -> None:
    """Raise an error that names a field, if there is one."""
    for name, value in fields.items():
        raise ValueError(
            f"{library} has no {type(module).__name__} with {name}, got {value!r}; leave it out"
        )


def _rows(module: Module, separate: bool) -> list[table.TensorRule]:
    """Return the rules of a module. Kernels are separate if q, k and v differ in features."""
    if isinstance(module, MultiHeadAttention):
        return _attention(module, "", "", separate)
    if isinstance(module, Block):
        return _block(module, "", "")
    block: Any = module.block
    rows = table.per_layer(module.num_layers, _block(block, "layers.{}", "layers_{}"))
    last = not block.post_norm if module.final_norm is None else module.final_norm
    return rows + (table.norm("norm", "norm", bias=bool(block.attention.use_bias)) if last else [])


def _attention(
    layer: MultiHeadAttention, theirs: str, ours: str, separate: bool
) -> list[table.TensorRule]:
    biases, leaves = (bool(layer.use_bias),) * 4, ("weight", "bias")
    rows = table.attention(theirs, ours, table.TORCH_HEADS, biases, leaves=leaves)
    if separate:  # The biases are still one tensor.
        rows[:1] = [
            table.TensorRule(f"{x}_proj_weight", path, table.transposed())
            for x, path in zip("qkv", rows[0].paths, strict=True)
        ]
    return rows


def _block(block: Block, theirs: str, ours: str) -> list[table.TensorRule]:
    layers = {"attention": "self_attn"}
    if isinstance(block, DecoderBlock):
        layers |= {"cross_attention": "multihead_attn"}
    rows: list[table.TensorRule] = []
    for name, torch_name in layers.items():
        rows += _attention(block.attention, f"{theirs}.{torch_name}", f"{ours}/{name}", False)
    names = {f"norm{i}": f"{name}_norm" for i, name in enumerate([*layers, "mlp"], 1)}
    names |= {"linear1": "mlp/up", "linear2": "mlp/down"}
    return rows + table.parts(theirs, ours, names, bool(block.attention.use_bias))


def array(x: Any) -> np.ndarray:
    """Return a NumPy array of the same dtype, bfloat16 included."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":
            return np.asarray(x.float()).astype(jnp.bfloat16)
    return np.asarray(x)
