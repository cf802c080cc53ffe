"""Conversion of other libraries' attention layers, without these libraries.

>>> module, variables = from_layer(timm_layer.state_dict(), num_heads=8)
>>> tensors = to_layer(module, variables, "x-transformers")
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict

from flax_mha.base import checks
from flax_mha.interop import table
from flax_mha.interop.table import PROJECTIONS, Family, TensorRule, in_out, transposed
from flax_mha.interop.torch_layers import array, check_layer, check_sizes
from flax_mha.layer.qk_norm import layer_norm
from flax_mha.linen import MultiHeadAttention

_NORM = layer_norm(1e-5)
_TORCH = (transposed, table.LEAVES)
_KERAS_VARS = (None, ("/vars/0", "/vars/1"))  # In `.weights.h5` files.
# The projections' names, those with a bias (None: all or none, "each": any), and two arguments of
# `table.attention`: the kernels' layout, and the suffixes of names.
LIBRARIES: dict[str, tuple[Any, Any, Any, tuple[str, str]]] = {
    "d2l": (("W_q", "W_k", "W_v", "W_o"), None, *_TORCH),
    "equinox": (("query_proj", "key_proj", "value_proj", "output_proj"), "each", *_TORCH),
    "haiku": (("query", "key", "value", "linear"), None, in_out, ("/w", "/b")),
    "keras": ((*PROJECTIONS[:3], "attention_output"), None, None, ("/kernel", "/bias")),
    "keras-h5": (("query_dense", "key_dense", "value_dense", "output_dense"), None, *_KERAS_VARS),
    "keras-h5-grouped": (
        ("_query_dense", "_key_dense", "_value_dense", "_output_dense"),
        None,
        *_KERAS_VARS,
    ),
    "mlx": (("query_proj", "key_proj", "value_proj", "out_proj"), None, *_TORCH),
    "timm": (("qkv", "qkv", "qkv", "proj"), "each", *_TORCH),
    "vit-pytorch": (("to_qkv", "to_qkv", "to_qkv", "to_out.0"), ("out",), *_TORCH),
    "x-transformers": (("to_q", "to_k", "to_v", "to_out"), (), *_TORCH),
}


def from_layer(tensors: Mapping[str, Any], num_heads: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a module and its variables from the tensors of another library's attention layer.

    Dropout rates and masks are lost. Options without a tensor must have their defaults.
    vit-pytorch's layer norms its input: it becomes an `nn.Sequential` of `nn.LayerNorm` and the
    layer.

    Args:
      tensors: the arrays by name, nested or flat, of a library in `LIBRARIES`: a state dict;
        Haiku's params; `{w.path: w.numpy() for w in layer.weights}` of Keras. A common prefix of
        the names is ignored.
      num_heads: N, the number of query heads.

    Raises:
      ValueError: if no library has such a layer, or if tensors are missing, surplus or misshapen.
        The error lists all of them.
    """
    checks.positive(num_heads=num_heads)
    # Nested arrays of MLX and Equinox have names with dots.
    forms = [flatten_dict(dict(tensors), sep=separator) for separator in "/."]
    # Equinox and MLX differ in the output projection.
    matches = [
        (sum(f"{start}{x}{leaf}" in form for x in names), library, start, form)
        for form in forms
        for library, (names, _, _, (leaf, _)) in LIBRARIES.items()
        for name in form
        if (start := name.removesuffix(names[0] + leaf)) != name and f"/{start}"[-1] in "/."
    ]
    if not matches:
        raise ValueError(
            f"tensors must be those of one attention layer of {sorted(LIBRARIES)}, got "
            f"{sorted(forms[0])[:4]} …; use from_torch for torch.nn"
        )
    _, library, start, form = max(matches, key=lambda x: x[0])
    flat = {name: array(x) for name, x in form.items()}
    theirs, biased, layout, (kernel, bias) = LIBRARIES[library]
    names, is_normed = [f"{start}{name}" for name in theirs], library == "vit-pytorch"
    # `from_tensors` reports a missing kernel.
    kernels = [flat.get(name + kernel, flat[names[0] + kernel]) for name in names]
    first, last = (-1, 0) if layout is transposed else (0, -1)
    query, key, value = (x.size // x.shape[first] // names.count(names[0]) for x in kernels[:3])
    K = kernels[1].shape[1] if layout is None else num_heads
    # Larger groups of x-transformers' heads have another order.
    if library == "x-transformers" and key == query // num_heads:
        K = 1
    # vit-pytorch has no output projection for one full head.
    full = is_normed and num_heads == 1 and query == kernels[0].shape[first]
    with_bias = tuple(x for x, name in zip(PROJECTIONS, names, strict=True) if name + bias in flat)
    if biased is None:
        biased = PROJECTIONS if with_bias else ()
    layer = MultiHeadAttention(
        num_heads,
        num_kv_heads=K,
        head_dim=query // num_heads,
        v_head_dim=value // K,
        out_features=None if full else kernels[3].shape[last],
        project_out=not full,
        use_bias=with_bias if biased == "each" else biased,
    )
    module = nn.Sequential([_NORM, layer]) if is_normed else layer
    inputs = kernels[:1] if is_normed else kernels[:3]
    example = tuple(np.zeros((1, 1, x.shape[first]), np.float32) for x in inputs)
    family = Family(module, example, _rows(library, layer, start))
    return module, table.from_tensors(family, flat)


def to_layer(
    module: nn.Module, variables: Mapping[str, Any], library: str, prefix: str = ""
) -> dict[str, np.ndarray]:
    """Return the tensors of a layer in another library, the inverse of `from_layer`.

    Args:
      module: the layer; for vit-pytorch an `nn.Sequential` of a norm and the layer.
      variables: its variables.
      library: a key of `LIBRARIES`.
      prefix: the prefix of all names.

    Raises:
      ValueError: if the library lacks an option of the layer, such as rotary.
      TypeError: if the module is no such layer.
    """
    checks.choice("library", library, LIBRARIES)
    is_vit = library == "vit-pytorch"
    *before, layer = module.layers if isinstance(module, nn.Sequential) else (module,)
    is_normed = before in ([_NORM], [nn.LayerNorm(1e-5)]) if is_vit else not before
    if not isinstance(layer, MultiHeadAttention) or not is_normed:
        raise TypeError(
            f"module must be an attention layer, for vit-pytorch an nn.Sequential of "
            f"nn.LayerNorm(1e-5) and one, got for {library} {checks.describe(module)}; give one"
        )
    full = is_vit and layer.num_heads == 1
    check_layer(layer.clone(project_out=full or layer.project_out), library)
    family = Family(module, (), _rows(library, layer, prefix))
    tensors = table.to_tensors(family, variables)
    check_sizes(library, lambda: from_layer(tensors, layer.num_heads))
    return tensors


def _rows(library: str, layer: MultiHeadAttention, prefix: str) -> list[TensorRule]:
    names, _, kernel, leaves = LIBRARIES[library]
    rows, ours = [], ""
    if library == "vit-pytorch":
        rows, ours = table.norm(f"{prefix}norm", "layers_0"), "layers_1"
    names = [f"{prefix}{name}" for name in names[: 4 if layer.project_out else 3]]
    return rows + table.attention("", ours, names, kernel, leaves)
