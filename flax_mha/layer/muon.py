"""The axes of kernels that Muon orthogonalizes, for `optax.contrib.muon`: one matrix a head."""

from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

# Which axes are rows and columns, from the last: [D, N, H] to heads, [N, H, D] from them. Axes
# before those are layers under `scan`.
_TO_HEADS, _FROM_HEADS = MuonDimensionNumbers(-3, -1), MuonDimensionNumbers(-2, -1)
_MATRIX = MuonDimensionNumbers(-2, -1)
_OF_HEADS = {
    "query": _TO_HEADS,
    "key": _TO_HEADS,
    "value": _TO_HEADS,
    "output_gate": _TO_HEADS,
    "out": _FROM_HEADS,
}
_MATRICES = {"up", "gate", "down", "router", "query_down", "kv_down"}
_EXPERTS = {"up_kernel", "gate_kernel", "down_kernel"}
# Vectors of each head, and the first and the last layer of a model.
_NONE = {"forget_gate", "patches", "head"}


def muon_dimensions(params: Any) -> Any:
    """Return which axes of each kernel are the rows and columns of a matrix, for Muon.

    Of attention layers each head has a matrix of its own, [D, H] of queries, keys and values and
    [H, D] of the output: no device needs the heads of another one. MLPs have one matrix, experts
    one each, and so have other kernels of two axes, such as those of `nn.Dense`. The rest has none,
    and goes to Adam: embeddings, biases, norms, a model's last layer, per-head vectors. Optax joins
    the axes of layers under `scan` with that of heads, which gathers heads that devices divide.

    >>> optimizer = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=muon_dimensions)

    Args:
      params: parameters of linen or nnx modules, of this package or of Flax, or their gradients.

    Returns:
      A tree of the same form, with `optax.contrib.MuonDimensionNumbers` or None.

    Sources: Jordan et al., "Muon", 2024; Liu et al., "Muon is Scalable for LLM Training", 2025.
    """
    return jax.tree_util.tree_map_with_path(_dimensions, params)


def _dimensions(path: Any, x: Any) -> MuonDimensionNumbers | None:
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if names[-1] == "value":
        names = names[:-1]  # That of a variable of nnx, or of a box of linen.
    parent, leaf = ("", *names)[-2:]
    if leaf in _EXPERTS:
        return _MATRIX
    if leaf != "kernel" or parent in _NONE or x.ndim < 2:
        return None
    if parent in _OF_HEADS and x.ndim > 2:
        # A gate of one number a head is no matrix.
        return None if x.shape[-1] == 1 else _OF_HEADS[parent]
    return _MATRIX if x.ndim == 2 or parent in _MATRICES else None
