"""The axes of kernels that Muon orthogonalizes, for `optax.contrib.muon`: one matrix a head."""

from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

# Rows and columns, counted from the last axis: [D, N, H] to heads, [N, H, D] from them. Axes
# before these are layers under `scan`.
_TO_HEADS, _MATRIX = MuonDimensionNumbers(-3, -1), MuonDimensionNumbers(-2, -1)
_OF_HEADS = {"query", "key", "value", "output_gate"}
_MATRICES = {"out", "up", "gate", "down", "router", "query_down", "kv_down"}
_EXPERTS = {"up_kernel", "gate_kernel", "down_kernel"}
# Vectors of each head, and the first and the last layer of a model.
_NONE = {"forget_gate", "patches", "head"}


def muon_dimensions(params: Any) -> Any:
    """Return the axes of each kernel that are the rows and columns of a matrix, for Muon.

    In attention layers each head has its own matrix, [D, H] of queries, keys and values and [H, D]
    of the output. MLPs have one matrix, each expert one, and other kernels of two axes, such as
    `nn.Dense`, too. The rest goes to Adam: embeddings, biases, norms, vectors, last layers. Optax
    gathers sharded heads of layers under `scan`.

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
        names = names[:-1]  # The value of an nnx variable, or of a linen box.
    parent, leaf = ("", *names)[-2:]
    if leaf in _EXPERTS:
        return _MATRIX
    if leaf != "kernel" or parent in _NONE or x.ndim < 2:
        return None
    if parent in _OF_HEADS and x.ndim > 2:
        # A gate with one number for each head is no matrix.
        return None if x.shape[-1] == 1 else _TO_HEADS
    return _MATRIX if x.ndim == 2 or parent in _MATRICES else None
