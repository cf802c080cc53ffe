"""Attention with derivatives of every order and mode, in O(T + S) memory on any platform.

These are the loops of `blockwise`, with each block of queries under `jax.checkpoint`, so that
derivatives save only its inputs. There is no custom derivative rule, so forward mode, reverse mode
and their mixtures work. With visit lists, the loop over tiles has a fixed length, because JAX
reverses no other loop, and `jax.lax.cond` skips empty tiles. The computation is in at least
float32, because higher derivatives add rounding errors.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Rabe and Staats,
"Self-attention Does Not Need O(n²) Memory", 2021.
"""

import functools
from typing import Any

import jax

from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec, Lowered
from flax_mha.kernels.xla import blockwise, reference


def lower(q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    """Prepare the call. `reference`, with all derivatives too, computes other normalizers."""
    if spec.normalizer != SOFTMAX:
        return reference.lower(q, k, v, spec)
    return Lowered(functools.partial(blockwise.attend, *spec.plain(q, k, v), remat=True))
