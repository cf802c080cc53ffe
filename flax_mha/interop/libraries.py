"""Conversion of other libraries' attention layers, without these libraries.

>>> module, variables = from_layer(timm_layer.state_dict(), num_heads=8)
>>> module, variables = from_layer("model.keras", num_heads=8, prefix="layers/attention/")
>>> tensors = to_layer(module, variables, "x-transformers")
"""

import contextlib
import functools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import ml_dtypes
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from flax_mha.base import checks
from flax_mha.interop import table
from flax_mha.interop.folders import AnyPath
from flax_mha.interop.table import PROJECTIONS, Family, TensorRule, in_out, transposed
from flax_mha.interop.torch_layers import array, check_layer, check_sizes
from flax_mha.layer.qk_norm import QKNorm, layer_norm
from flax_mha.linen import MultiHeadAttention
from flax_mha.positions import Rotary

_NORM = layer_norm(1e-5)
_TORCH: Any = (transposed, table.LEAVES)
_KERAS_VARS: Any = (None, ("/vars/0", "/vars/1"))  # In `.weights.h5` files.
_KERNEL_BIAS = ("/kernel", "/bias")


def _heads_first(inputs: int) -> table.Layout:
    """Return the layout of Gemma's einsums: [N, D, H], and [N, H, D] for the output."""
    if inputs == 2:
        return table.SAME
    return (lambda x, shape: x.swapaxes(-3, -2).reshape(shape), lambda x: x.swapaxes(0, 1))


class Library(NamedTuple):
    """The tensors of a library's attention layer.

    Attributes:
      names: the names of the query, key, value and output projections.
      biased: the projections with a bias. None: all or none, "each": any.
      kernel: the kernels' layout, see `table.attention`, also for `leaves`.
      leaves: the suffixes of kernels and biases.
      norms: the names of the norms of queries and keys.
      normed: the layer's fields if it has these norms.
      offset: the norms' scales are stored minus this.
      fields: the layer's other fields.
      options: fields that are options of the library's layers too, without a tensor.
    """

    names: tuple[str, str, str, str]
    biased: Any
    kernel: Any
    leaves: tuple[str, str]
    norms: tuple[str, ...] = ()
    normed: Mapping[str, Any] = {}
    offset: float = 0.0
    fields: Mapping[str, Any] = {}
    options: tuple[str, ...] = ()


_OPTIONS = ("rotary", "scale", "scores", "qk_norm")
_GEMMA = Library(
    ("q_einsum", "kv_einsum", "kv_einsum", "attn_vec_einsum"), (), _heads_first, ("/w", "/b"),
    ("_query_norm", "_key_norm"), {"qk_norm": QKNorm()}, 1.0, {"rotary": Rotary()}, _OPTIONS,
)  # fmt: skip
_FLAX = Library(
    PROJECTIONS, "each", None, _KERNEL_BIAS, ("query_ln", "key_ln"), {"normalize_qk": True},
    options=("normalize_qk",),
)  # fmt: skip
_KAULDRON = _FLAX._replace(norms=("query_norm", "key_norm"))
LIBRARIES: dict[str, Library] = {
    "d2l": Library(("W_q", "W_k", "W_v", "W_o"), None, *_TORCH),
    "equinox": Library(("query_proj", "key_proj", "value_proj", "output_proj"), "each", *_TORCH),
    "flax": _FLAX,
    "gemma": _GEMMA,
    "gemma-qkv": _GEMMA._replace(names=("qkv_einsum",) * 3 + ("attn_vec_einsum",)),
    "haiku": Library(("query", "key", "value", "linear"), None, in_out, ("/w", "/b")),
    "kauldron": _KAULDRON,
    "keras": Library((*PROJECTIONS[:3], "attention_output"), None, None, _KERNEL_BIAS),
    "keras-h5": Library(
        ("query_dense", "key_dense", "value_dense", "output_dense"), None, *_KERAS_VARS
    ),
    "keras-h5-grouped": Library(
        ("_query_dense", "_key_dense", "_value_dense", "_output_dense"), None, *_KERAS_VARS
    ),
    # Its initializer divides the query kernel by √H, so that scores need no scale.
    "maxtext": _KAULDRON._replace(
        normed={"qk_norm": QKNorm(epsilon=1e-5)}, fields={"scale": 1.0}, options=_OPTIONS
    ),
    "mlx": Library(("query_proj", "key_proj", "value_proj", "out_proj"), None, *_TORCH),
    "timm": Library(("qkv", "qkv", "qkv", "proj"), "each", *_TORCH),
    "vit-pytorch": Library(("to_qkv", "to_qkv", "to_qkv", "to_out.0"), ("out",), *_TORCH),
    "x-transformers": Library(("to_q", "to_k", "to_v", "to_out"), (), *_TORCH),
}
# Libraries whose layers have the same names.
_SHARED = ("flax", "kauldron", "maxtext")


def from_layer(
    tensors: Mapping[str, Any] | AnyPath, num_heads: int, library: str | None = None, *,
    prefix: str = "", **fields: Any,
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Return a module and its variables from the tensors of another library's attention layer.

    Dropout rates and masks are lost. Options without a tensor must have their defaults, or be
    given as `fields`. vit-pytorch's layer norms its input: it becomes an `nn.Sequential` of
    `nn.LayerNorm` and the layer.

    Args:
      tensors: the arrays by name, nested or flat, of a library in `LIBRARIES`: a state dict;
        Haiku's params; `{w.path: w.numpy() for w in layer.weights}` of Keras; a state of nnx, also
        as Orbax restores it. Or Keras' file, `.weights.h5` or `.keras`, which h5py reads.
      num_heads: N, the number of query heads.
      library: a key of `LIBRARIES` (default: recognized by the names). Needed for Flax, Kauldron
        and MaxText, which have the same names.
      prefix: the layer's prefix, if there are other tensors (default: a common prefix is ignored).
      **fields: more fields of the `MultiHeadAttention`, such as `rotary`, `scale` and `scores`.
        Defaults: for gemma `rotary=Rotary()`, and for MaxText `scale=1.0`, as the scale lies in its
        query kernel.

    Raises:
      ValueError: if no library has such a layer, or if tensors are missing, surplus or misshapen.
        The error lists all of them.
    """
    checks.positive(num_heads=num_heads)
    if not isinstance(tensors, Mapping):
        tensors = _read_keras(Path(tensors))
    if isinstance(tensors, nnx.State):
        tensors = nnx.to_pure_dict(tensors)
    known = LIBRARIES
    if library is not None:
        known = {library: checks.choice("library", library, LIBRARIES)}
    nested = {tuple(map(str, path)): x for path, x in flatten_dict(dict(tensors)).items()}
    # Nested arrays of MLX and Equinox have names with dots.
    forms = [{mark.join(path): x for path, x in nested.items()} for mark in "/."]
    # Equinox and MLX differ in the output projection.
    matches = [
        (sum(f"{start}{x}{own.leaves[0]}" in form for x in own.names), found, start, form)
        for form in map(functools.partial(_under, prefix), forms)
        for found, own in known.items()
        for name in form
        if (start := name.removesuffix(own.names[0] + own.leaves[0])) != name
        and f"/{start}"[-1] in "/."
    ]
    if not matches:
        raise ValueError(
            f"tensors must be those of one attention layer of {sorted(known)}, got "
            f"{sorted(forms[0])[:4]} … and prefix={prefix!r}; use from_torch for torch.nn"
        )
    most, found, start, form = max(matches, key=lambda x: x[0])
    starts = {x[2] for x in matches if x[0] == most}
    if len(starts) > 1:
        raise ValueError(
            f"tensors must be those of one attention layer, got {len(starts)}; choose one by "
            f"prefix=, of {sorted(starts)[:100]}"
        )
    own = LIBRARIES[found]
    flat = {name: array(x) for name, x in form.items()}
    kernel, bias = own.leaves
    names, is_normed = [f"{start}{name}" for name in own.names], found == "vit-pytorch"
    # `from_tensors` reports a missing kernel.
    kernels = [flat.get(name + kernel, flat[names[0] + kernel]) for name in names]
    if own.kernel is None and kernels[0].ndim != 3:
        raise ValueError(
            f"{names[0]}{kernel} must be [D, N, H], got {list(kernels[0].shape)}; take one layer "
            f"of a stack, and reshape T5X's matrices, which have the scale of library='maxtext'"
        )
    if library is None and found in _SHARED:
        raise ValueError(
            f"library must be given, as {', '.join(_SHARED)} have the same names, got None; "
            f"parameters of Flax's layer need no conversion, MultiHeadAttention has the same"
        )
    first, last = {transposed: (-1, 0), _heads_first: (-2, -1)}.get(own.kernel, (0, -1))
    query, key, value = (
        x.size // x.shape[first] // names.count(name)
        for x, name in zip(kernels[:3], names, strict=False)
    )
    K = kernels[1].shape[1] if own.kernel in (None, _heads_first) else num_heads
    # Larger groups of x-transformers' heads have another order.
    if found == "x-transformers" and key == query // num_heads:
        K = 1
    # vit-pytorch has no output projection for one full head.
    full = is_normed and num_heads == 1 and query == kernels[0].shape[first]
    with_bias = tuple(x for x, name in zip(PROJECTIONS, names, strict=True) if name + bias in flat)
    biased = with_bias if own.biased == "each" else own.biased
    if biased is None:
        biased = PROJECTIONS if with_bias else ()
    is_qk_normed = any(f"{start}{name}/scale" in flat for name in own.norms)
    layer = MultiHeadAttention(
        num_heads,
        num_kv_heads=K,
        head_dim=query // num_heads,
        v_head_dim=value // K,
        out_features=None if full else kernels[3].shape[last],
        project_out=not full,
        use_bias=biased,
        **{**own.fields, **(own.normed if is_qk_normed else {}), **fields},
    )
    module = nn.Sequential([_NORM, layer]) if is_normed else layer
    inputs = kernels[:1] if is_normed else kernels[:3]
    example = tuple(np.zeros((1, 1, x.shape[first]), np.float32) for x in inputs)
    family = Family(module, example, _rows(found, layer, start))
    return module, table.from_tensors(family, flat)


def _under(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays with a prefix. States that Orbax restored lose their last level."""
    return {name.removesuffix("/value"): x for name, x in arrays.items() if name.startswith(prefix)}


def _read_keras(path: Path) -> dict[str, Any]:
    """Return the arrays of a Keras file, by path."""
    import h5py

    arrays = {}

    def visit(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset):
            x = entry[()]
            is_half = entry.attrs.get("dtype") == "bfloat16"  # HDF5 has only its bytes.
            arrays[name] = x.view(ml_dtypes.bfloat16) if is_half else x

    with contextlib.ExitStack() as opened:
        file: Any = path
        if path.suffix == ".keras":
            file = opened.enter_context(zipfile.ZipFile(path)).open("model.weights.h5")
        opened.enter_context(h5py.File(file)).visititems(visit)
    return arrays


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
    own = LIBRARIES[library]
    if "scale" in own.fields and layer.scale is None:
        raise ValueError(
            f"{library} applies no scale of its own, got a layer with scale=None; give the layer "
            f"its scale as a number, and {library} too if it is not {own.fields['scale']}"
        )
    full = is_vit and layer.num_heads == 1
    check_layer(layer.clone(project_out=full or layer.project_out), library, own.options)
    family = Family(module, (), _rows(library, layer, prefix))
    tensors = table.to_tensors(family, variables)
    fields = {name: getattr(layer, name) for name in own.options}
    check_sizes(library, lambda: from_layer(tensors, layer.num_heads, library, **fields))
    return tensors


def _rows(library: str, layer: MultiHeadAttention, prefix: str) -> list[TensorRule]:
    own = LIBRARIES[library]
    rows, ours = [], ""
    if library == "vit-pytorch":
        rows, ours = table.norm(f"{prefix}norm", "layers_0"), "layers_1"
    for name, norm in zip(own.norms, ("query_ln", "key_ln"), strict=False):
        rows.append(
            TensorRule(
                f"{prefix}{name}/scale",
                f"{norm}/scale",
                table.plus(own.offset) if own.offset else table.SAME,
            )
        )
    names = [f"{prefix}{name}" for name in own.names[: 4 if layer.project_out else 3]]
    rows += table.attention("", ours, names, own.kernel, own.leaves)
    if own.kernel is not _heads_first:
        return rows
    to_ours, to_theirs = _heads_first(1)
    stacked = (to_ours, lambda x: to_theirs(x)[None])  # [2, K, D, H] or [3, N, D, H].
    return [row._replace(axes=stacked) if len(row.paths) > 1 else row for row in rows]
