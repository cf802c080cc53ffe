"""Attention with derivatives of every order and mode, in O(T + S) memory on any platform.

The loops are those of `blockwise`. Each block of queries is computed under `jax.checkpoint`, so
derivatives save only its inputs. Without a custom derivative rule, forward mode, reverse mode and
their mixtures work at any order. With visit lists, the loop over tiles has a fixed length, because
JAX reverses no other loop, and `jax.lax.cond` skips empty tiles.

The kernel computes in at least float32, because higher derivatives add
rounding errors. Only the order of its sums differs.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Rabe and Staats,
"Self-attention Does Not Need O(n²) Memory", 2021.
"""

import functools

import jax

from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Platform
from flax_mha.kernels.xla import blockwise


def lower(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, platform: Platform
) -> Lowered:
    """Prepare the call. This kernel supports every call with a softmax."""
    return functools.partial(blockwise.attend, q, k, v, spec, platform, remat=True)
