"""Attention layers of other libraries as ours, and back; none of them is needed.

>>> module, variables = from_layer(theirs.state_dict(), num_heads=8)
>>> tensors = to_layer(module, variables, "x-transformers")
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict

from flax_mha.base import checks
from flax_mha.interop import table
from flax_mha.interop.table import PROJECTIONS, Family, Layout, TensorRule, in_out, transposed
from flax_mha.interop.torch_layers import LAYER, array, default
from flax_mha.layer import settings
from flax_mha.linen import MultiHeadAttention

# As torch.nn has it.
_NORM = nn.LayerNorm(1e-5)


class Library(NamedTuple):
    """The tensors of a library's attention layer.

    Attributes:
      names: of the projections of queries, keys, values and out; one name thrice is one tensor in
        which the three lie one after another.
      biased: the projections that have a bias; or None if all or none have, "each" if each may.
      leaves: what follows a name, of the kernel and of the bias.
      kernel: how one lies, by how many axes ours has for its inputs; None as ours.
      norm: of the LayerNorm that is part of the layer.
    """

    names: tuple[str, str, str, str]
    biased: tuple[str, ...] | str | None = None
    leaves: tuple[str, str] = table.LEAVES
    kernel: Callable[[int], Layout] | None = transposed
    norm: str | None = None


LIBRARIES = {
    "d2l": Library(("W_q", "W_k", "W_v", "W_o")),
    "equinox": Library(("query_proj", "key_proj", "value_proj", "output_proj"), "each"),
    "haiku": Library(("query", "key", "value", "linear"), None, ("/w", "/b"), in_out),
    "keras": Library((*PROJECTIONS[:3], "attention_output"), None, ("/kernel", "/bias"), None),
    "timm": Library(("qkv", "qkv", "qkv", "proj"), "each"),
    "vit-pytorch": Library(("to_qkv", "to_qkv", "to_qkv", "to_out.0"), ("out",), norm="norm"),
    "x-transformers": Library(("to_q", "to_k", "to_v", "to_out"), ()),
}


def from_layer(tensors: Mapping[str, Any], num_heads: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return the module and the variables that arrays of another library's attention layer mean.

    `MultiHeadAttention` of d2l, Equinox, Haiku and Keras (and its `GroupQueryAttention`),
    `Attention` of timm, x-transformers and vit-pytorch. The last norms its input, and is an
    `nn.Sequential` of `nn.LayerNorm` and the layer. Dropout rates and masks are said anew.

    Args:
      tensors: by name: a state dict; Haiku's params; `{w.path: w.numpy() for w in layer.weights}`
        of Keras; of Equinox by attributes, "query_proj.weight". What all names begin with is left
        out.
      num_heads: N, of queries.

    Raises:
      ValueError: if it is no such layer: one error with every tensor that is missing, surplus, as
        of options that ours lacks, or of another shape. Options that leave no tensor must be as
        they are by default.
    """
    checks.positive(num_heads=num_heads)
    flat = {name: array(x) for name, x in flatten_dict(dict(tensors), sep="/").items()}
    matches = [
        (library, name.removesuffix(query))
        for library in LIBRARIES.values()
        for query in [library.names[0] + library.leaves[0]]
        for name in flat
        if f"/{name}".endswith((f".{query}", f"/{query}"))
    ]
    if not matches:
        raise ValueError(
            f"from_layer takes the tensors of one attention layer of {sorted(LIBRARIES)}, got "
            f"{sorted(flat)[:4]} …; for torch.nn there is from_torch"
        )
    library, start = matches[0]
    kernel, bias = library.leaves
    names = [f"{start}{name}" for name in library.names]
    # One that is missing is told with all others, by the table.
    kernels = [flat.get(name + kernel, flat[names[0] + kernel]) for name in names]
    if not all(x.size and x.ndim > 1 for x in kernels):
        raise ValueError(f"kernels have two axes or three, got {[x.shape for x in kernels]}")
    first, last = (-1, 0) if library.kernel is transposed else (0, -1)
    parts = names.count(names[0])
    query, _, value = (x.size // x.shape[first] // parts for x in kernels[:3])
    K = kernels[1].shape[1] if library.kernel is None else num_heads
    with_bias = tuple(
        mine for mine, name in zip(PROJECTIONS, names, strict=True) if name + bias in flat
    )
    biased = (PROJECTIONS if with_bias else ()) if library.biased is None else library.biased
    layer = MultiHeadAttention(
        num_heads, num_kv_heads=K, head_dim=query // num_heads, v_head_dim=value // K,
        out_features=kernels[3].shape[last], use_bias=with_bias if biased == "each" else biased,
    )  # fmt: skip
    module = layer if library.norm is None else nn.Sequential([_NORM, layer])
    inputs = kernels[:3] if library.norm is None else kernels[:1]
    example = tuple(np.zeros((1, 1, x.shape[first]), np.float32) for x in inputs)
    family = Family(module, example, _rows(library, layer, start))
    return module, table.from_tensors(family, flat)


def to_layer(
    module: nn.Module, variables: Mapping[str, Any], library: str, prefix: str = ""
) -> dict[str, np.ndarray]:
    """Return the tensors of the layer of one of `LIBRARIES`: `from_layer`, read backwards.

    Their names begin with the prefix, such as "multi_head_attention/".

    Raises:
      ValueError: if the library has no such layer, as with rotary.
      TypeError: if it is no module of that kind.
    """
    known = checks.choice("library", library, LIBRARIES)
    *before, layer = module.layers if isinstance(module, nn.Sequential) else (module,)
    is_normed = before == [_NORM] if known.norm is not None else not before
    if not isinstance(layer, MultiHeadAttention) or not is_normed:
        raise TypeError(
            f"to_layer takes an attention layer, as vit-pytorch's an nn.Sequential of "
            f"nn.LayerNorm(1e-5) and one; got for {library} {checks.describe(module)}"
        )
    default(layer, MultiHeadAttention, LAYER, library)
    try:
        family = Family(module, (), _rows(known, layer, prefix))
        tensors = table.to_tensors(family, variables)
        from_layer(tensors, layer.num_heads)
    except ValueError as error:
        raise ValueError(f"{library} has no layer of such sizes and biases: {error}") from None
    return tensors


def _rows(library: Library, layer: MultiHeadAttention, theirs: str) -> list[TensorRule]:
    """Return the table of a layer, whose names begin with `theirs`."""
    rows, ours = [], ""
    if library.norm is not None:
        rows, ours = table.norm(f"{theirs}{library.norm}", "layers_0"), "layers_1"
    names = [f"{theirs}{name}" for name in library.names]
    biases = [settings.has_bias(layer.use_bias, name) for name in PROJECTIONS]
    return rows + table.attention("", ours, names, biases, library.kernel, library.leaves)
