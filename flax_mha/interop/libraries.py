"""Conversion of other libraries' attention layers, without these libraries.

>>> module, variables = from_layer(timm_layer.state_dict(), num_heads=8)
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
from flax_mha.interop.torch_layers import array, check_layer
from flax_mha.layer import settings
from flax_mha.layer.qk_norm import layer_norm
from flax_mha.linen import MultiHeadAttention

# With the epsilon of torch.nn.
_NORM = layer_norm(1e-5)
# The names in Keras' `.weights.h5` files.
_KERAS_H5 = ("query_dense", "key_dense", "value_dense", "output_dense")
_KERAS_GROUPED = ("_query_dense", "_key_dense", "_value_dense", "_output_dense")
_KERAS_VARS = ("/vars/0", "/vars/1")


class Library(NamedTuple):
    """The tensors of a library's attention layer, as arguments of `table.attention`.

    Attributes:
      names: the names of the projections.
      biased: the projections with a bias; None if all or none have one, "each" if each may.
      leaves: the suffixes of names.
      kernel: the layout of kernels.
      norm: the name of the layer's LayerNorm, or None.
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
    "keras-h5": Library(_KERAS_H5, None, _KERAS_VARS, None),
    "keras-h5-grouped": Library(_KERAS_GROUPED, None, _KERAS_VARS, None),
    "mlx": Library(("query_proj", "key_proj", "value_proj", "out_proj")),
    "timm": Library(("qkv", "qkv", "qkv", "proj"), "each"),
    "vit-pytorch": Library(("to_qkv", "to_qkv", "to_qkv", "to_out.0"), ("out",), norm="norm"),
    "x-transformers": Library(("to_q", "to_k", "to_v", "to_out"), ()),
}


def from_layer(tensors: Mapping[str, Any], num_heads: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a module and its variables from the tensors of another library's attention layer.

    `MultiHeadAttention` of d2l, Equinox, Haiku, MLX and Keras (with `GroupQueryAttention`, and from
    `.weights.h5` files), and `Attention` of timm, x-transformers and vit-pytorch are supported.
    vit-pytorch's layer norms its input, so it becomes an `nn.Sequential` of `nn.LayerNorm` and the
    layer. Dropout rates and masks are lost. Options without a tensor must have their defaults.

    Args:
      tensors: the arrays by name: a state dict; Haiku's params; `{w.path: w.numpy() for w in
        layer.weights}` of Keras; MLX's and Equinox's attributes, "query_proj.weight". A common
        prefix of the names is ignored.
      num_heads: N, the number of query heads.

    Raises:
      ValueError: if no library has such a layer, or if tensors are missing, surplus or misshapen.
        The error lists all of them.
    """
    checks.positive(num_heads=num_heads)
    # Nested arrays of MLX and Equinox have names with dots.
    for separator in "/.":
        nested = flatten_dict(dict(tensors), sep=separator)
        flat = {name: array(x) for name, x in nested.items()}
        matches = [
            (library, name.removesuffix(query))
            for library in LIBRARIES.values()
            for query in [library.names[0] + library.leaves[0]]
            for name in flat
            if f"/{name}".endswith((f".{query}", f"/{query}"))
        ]
        if matches:
            break
    else:
        raise ValueError(
            f"tensors must be those of one attention layer of {sorted(LIBRARIES)}, got "
            f"{sorted(flat)[:4]} …; use from_torch for torch.nn"
        )
    # Equinox and MLX differ only in the name of the output projection.
    library, start = max(
        matches, key=lambda x: sum(f"{x[1]}{name}{x[0].leaves[0]}" in flat for name in x[0].names)
    )
    kernel, bias = library.leaves
    names = [f"{start}{name}" for name in library.names]
    # The query's kernel replaces a missing one, which `from_tensors` reports.
    kernels = [flat.get(name + kernel, flat[names[0] + kernel]) for name in names]
    if not all(x.size and x.ndim > 1 for x in kernels):
        shapes = [x.shape for x in kernels]
        raise ValueError(f"kernels must have two axes or three, got {shapes}; do not reshape them")
    first, last = (-1, 0) if library.kernel is transposed else (0, -1)
    parts = names.count(names[0])
    query, key, value = (x.size // x.shape[first] // parts for x in kernels[:3])
    K = kernels[1].shape[1] if library.kernel is None else num_heads
    # Larger groups of x-transformers' heads have another order.
    if library is LIBRARIES["x-transformers"] and key == query // num_heads:
        K = 1
    # vit-pytorch has no output projection if one head is as wide as the input.
    full = library.norm is not None and num_heads == 1 and query == kernels[0].shape[first]
    with_bias = tuple(x for x, name in zip(PROJECTIONS, names, strict=True) if name + bias in flat)
    biased = (PROJECTIONS if with_bias else ()) if library.biased is None else library.biased
    layer = MultiHeadAttention(
        num_heads, num_kv_heads=K, head_dim=query // num_heads, v_head_dim=value // K,
        out_features=None if full else kernels[3].shape[last], project_out=not full,
        use_bias=with_bias if biased == "each" else biased,
    )  # fmt: skip
    module = layer if library.norm is None else nn.Sequential([_NORM, layer])
    inputs = kernels[:3] if library.norm is None else kernels[:1]
    example = tuple(np.zeros((1, 1, x.shape[first]), np.float32) for x in inputs)
    family = Family(module, example, _rows(library, layer, start))
    return module, table.from_tensors(family, flat)


def to_layer(
    module: nn.Module, variables: Mapping[str, Any], library: str, prefix: str = ""
) -> dict[str, np.ndarray]:
    """Return the tensors of a layer in another library, the inverse of `from_layer`.

    Args:
      module: the attention layer; for vit-pytorch an `nn.Sequential` of a norm and the layer.
      variables: the module's variables.
      library: a key of `LIBRARIES`.
      prefix: the prefix of all names.

    Raises:
      ValueError: if the library lacks an option of the layer, such as rotary.
      TypeError: if the module is no such layer.
    """
    known = checks.choice("library", library, LIBRARIES)
    *before, layer = module.layers if isinstance(module, nn.Sequential) else (module,)
    is_normed = before in ([_NORM], [nn.LayerNorm(1e-5)]) if known.norm else not before
    if not isinstance(layer, MultiHeadAttention) or not is_normed:
        raise TypeError(
            f"module must be an attention layer, for vit-pytorch an nn.Sequential of "
            f"nn.LayerNorm(1e-5) and one, got for {library} {checks.describe(module)}; give one"
        )
    full = known.norm is not None and layer.num_heads == 1
    check_layer(layer.clone(project_out=full or layer.project_out), library)
    try:
        family = Family(module, (), _rows(known, layer, prefix))
        tensors = table.to_tensors(family, variables)
        from_layer(tensors, layer.num_heads)
    except ValueError as error:
        raise ValueError(
            f"module must have sizes and biases that {library} supports, got an error: {error}"
        ) from None
    return tensors


def _rows(library: Library, layer: MultiHeadAttention, prefix: str) -> list[TensorRule]:
    rows, ours = [], ""
    if library.norm is not None:
        rows, ours = table.norm(f"{prefix}{library.norm}", "layers_0"), "layers_1"
    names = [f"{prefix}{name}" for name in library.names[: 4 if layer.project_out else 3]]
    biases = [settings.has_bias(layer.use_bias, name) for name in PROJECTIONS]
    return rows + table.attention("", ours, names, biases, library.kernel, library.leaves)
