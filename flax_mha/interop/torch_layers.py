"""Layers of `torch.nn` as modules of ours, and back; PyTorch itself is not needed.

>>> module, variables = from_torch(theirs.state_dict(), num_heads=8)
>>> theirs.load_state_dict({k: torch.tensor(x) for k, x in to_torch(module, variables).items()})
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks
from flax_mha.interop import table
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, Encoder
from flax_mha.models.blocks import Block, DecoderBlock, EncoderBlock
from flax_mha.models.feed_forward import Activation
from flax_mha.models.stacks import Stack

Module: TypeAlias = MultiHeadAttention | Block | Stack

_OWN = table.PROJECTIONS[:3]
# What names of the first attention layer begin with, in a stack, in a block and alone.
_FIRST = ("layers.0.self_attn.", "self_attn.", "")
# What the layers of torch.nn and other libraries can't do: each field must be as it is by default.
LAYER = (
    "scores", "scale", "rotary", "qk_norm", "normalize_qk", "gate", "sinks", "normalizer",
    "attention_fn", "project_out",
)  # fmt: skip
_BLOCK = ("gated", "branch_norm", "parallel", "layer_scale", "mlp")
_STACK = ("scores", "input_norm", "kv_from")


def from_torch(
    state_dict: Mapping[str, Any],
    num_heads: int,
    *,
    norm_first: bool = False,
    activation: str | Activation = "relu",
    layer_norm_eps: float = 1e-5,
) -> tuple[Module, dict[str, Any]]:
    """Return the module and the variables that a state dict of `torch.nn` means.

    Of `MultiheadAttention` (with `kdim` and `vdim` too), `TransformerEncoderLayer`,
    `TransformerEncoder`, `TransformerDecoderLayer` and `TransformerDecoder`. All take the batch
    first. Masks are arguments of the call as there, but True means that a key may be seen; a
    decoder is causal by itself. Dropout rates are 0, and set by `module.clone(...)`.

    Args:
      state_dict: arrays by name, PyTorch's tensors or any other.
      num_heads: N, which is not in the state dict; nor are the options that follow.
      norm_first: of blocks.
      activation: of blocks; PyTorch's "gelu" is "gelu_exact".
      layer_norm_eps: of blocks.

    Raises:
      ValueError: if it is of another layer, or has `bias_k` and `bias_v`; `add_zero_attn` leaves no
        trace in it, and must not be set.
    """
    checks.positive(num_heads=num_heads)
    tensors = {name: array(x) for name, x in state_dict.items()}
    at = next((at for at in _FIRST if f"{at}out_proj.weight" in tensors), None)
    if at is None:
        raise ValueError(
            f"from_torch takes the state dict of one attention layer, one block or one stack of "
            f"torch.nn, got {sorted(tensors)[:4]} …; of a part of a model leave out its prefix"
        )
    for name in tensors:
        if name.endswith(("bias_k", "bias_v")):
            raise ValueError(
                f"a layer with add_bias_kv can't be loaded, as ours has no learned key, got {name}"
            )
    layer = MultiHeadAttention(num_heads, use_bias=f"{at}out_proj.bias" in tensors)
    options = {
        "pre_norm": norm_first, "activation": activation, "norm_epsilon": layer_norm_eps,
    }  # fmt: skip
    module = _blocks(layer, tensors, at.removesuffix("self_attn."), options) if at else layer
    features = [len(tensors[f"{at}out_proj.weight"])]
    if isinstance(module, DecoderBlock | Decoder):
        features *= 2
    apart = not at and "q_proj_weight" in tensors
    if apart:
        features += [tensors[f"{name}_proj_weight"].shape[-1] for name in "kv"]
    example = tuple(np.zeros((1, 1, D), np.float32) for D in features)
    return module, table.from_tensors(table.Family(module, example, _rows(module, apart)), tensors)


def _blocks(
    layer: MultiHeadAttention, tensors: Mapping[str, Any], first: str, options: dict[str, Any]
) -> Block | Stack:
    """Return one block with that layer; or a stack, if names of the first begin with something."""
    options["mlp_dim"] = len(tensors[f"{first}linear1.weight"])
    if not layer.use_bias:
        options["norm"] = nn.LayerNorm(options["norm_epsilon"], use_bias=False)
    block: Block = EncoderBlock(layer, **options)
    if f"{first}multihead_attn.out_proj.weight" in tensors:
        block = DecoderBlock(layer, **options, cross_attention=layer.copy())
    if not first:
        return block
    count = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    stack = Decoder if isinstance(block, DecoderBlock) else Encoder
    return stack(count, block, final_norm="norm.weight" in tensors)


def to_torch(module: Module, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the state dict of a module as a layer of `torch.nn`: `from_torch`, read backwards.

    Masks and dropout rates are no part of it, nor is `norm_first` and the like.

    Raises:
      ValueError: if `torch.nn` has no such layer, as with rotary or shared heads of keys, or if the
        variables are not those of the module.
      TypeError: if it is no module of those kinds.
    """
    if not isinstance(module, MultiHeadAttention | Block | Stack):
        raise TypeError(
            f"to_torch takes an attention layer, a block or a stack, got {checks.describe(module)}"
        )
    _check(module)
    params = variables["params"]
    apart = False
    if isinstance(module, MultiHeadAttention):
        apart = len({params[name]["kernel"].shape[0] for name in _OWN}) > 1
    tensors = table.to_tensors(table.Family(module, (), _rows(module, apart)), variables)
    for name, x in tensors.items():
        if name.endswith("in_proj_weight") and x.shape[0] != 3 * x.shape[1]:
            raise ValueError(
                f"torch.nn has heads of all features together, and as many of keys and values; got "
                f"{name} of {x.shape}"
            )
    return tensors


def _check(module: Any) -> None:
    """Refuse what torch.nn would compute otherwise."""
    if isinstance(module, Stack):
        default(module, Stack, _STACK)
        if not isinstance(module.block, Block):
            raise ValueError("torch.nn has stacks of one block; got several in turn")
        _check(module.block)
    elif isinstance(module, Block):
        default(module, Block, _BLOCK)
        if module.norm != "layernorm" and not isinstance(module.norm, nn.LayerNorm):
            raise ValueError(f"torch.nn has blocks with LayerNorm alone, got norm={module.norm!r}")
        _check(module.attention)
        if isinstance(module, DecoderBlock) and module.cross_attention is not None:
            _check(module.cross_attention)
    else:
        default(module, MultiHeadAttention, LAYER)


def default(module: Any, cls: Any, names: tuple[str, ...], library: str = "torch.nn") -> None:
    """Refuse fields that are not as they are by default, for the library has no others."""
    for name in names:
        if getattr(module, name) != getattr(cls, name):
            raise ValueError(
                f"{library} has no {cls.__name__} with {name}, got {getattr(module, name)!r}"
            )


def _rows(module: Module, apart: bool) -> list[table.TensorRule]:
    """Return the table of a module; `apart` if q, k and v are of different features."""
    if isinstance(module, MultiHeadAttention):
        return _attention(module, "", "", apart)
    if isinstance(module, Block):
        return _block(module, "", "")
    block: Any = module.block
    rows = table.per_layer(module.num_layers, _block(block, "layers.{}.", "layers_{}/"))
    last = not block.post_norm if module.final_norm is None else module.final_norm
    return rows + (table.norm("norm", "norm", bias=bool(block.attention.use_bias)) if last else [])


def _attention(
    layer: MultiHeadAttention, theirs: str, ours: str, apart: bool
) -> list[table.TensorRule]:
    bias, leaves = bool(layer.use_bias), ("_weight", "_bias")
    paths = tuple(f"{ours}{name}" for name in _OWN)
    rows = table.linear(f"{theirs}in_proj", paths, bias, leaves=leaves)
    if apart:  # But for the biases.
        rows[:1] = [
            table.TensorRule(f"{theirs}{x}_proj_weight", path, table.transposed())
            for x, path in zip("qkv", rows[0].paths, strict=True)
        ]
    return rows + table.linear(f"{theirs}out_proj", f"{ours}out", bias, inputs=2)


def _block(block: Block, theirs: str, ours: str) -> list[table.TensorRule]:
    bias = bool(block.attention.use_bias)
    layers = {"attention": "self_attn"}
    if isinstance(block, DecoderBlock):
        layers |= {"cross_attention": "multihead_attn"}
    rows: list[table.TensorRule] = []
    for name, their in layers.items():
        rows += _attention(block.attention, f"{theirs}{their}.", f"{ours}{name}/", False)
    for i, name in enumerate([*layers, "mlp"], 1):
        rows += table.norm(f"{theirs}norm{i}", f"{ours}{name}_norm", bias)
    rows += table.linear(f"{theirs}linear1", f"{ours}mlp/up", bias)
    return rows + table.linear(f"{theirs}linear2", f"{ours}mlp/down", bias)


def array(x: Any) -> np.ndarray:
    """Return an array in its own dtype; NumPy itself has no bfloat16."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":
            return np.asarray(x.float()).astype(jnp.bfloat16)
    return np.asarray(x)
