"""Checks that any attention layer must pass, for layers with their own projections."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from tests.support.oracle import float64, random_like

KEY = jax.random.key(0)


def drawn(module: nn.Module, *inputs: Any) -> Any:
    """Return random parameters, including biases and scales, which would start at 0 and 1.

    Every projection must have a bias, so that no test passes because the layer forgets it.
    """
    params = random_like(jax.eval_shape(module.init, KEY, *inputs))
    paths = flatten_dict(params["params"])
    for path in paths:
        # The bias of the forget gate has its own name.
        if path[-1] == "kernel" and "forget_gate" not in path:
            assert (*path[:-1], "bias") in paths, f"no bias beside {path}"
    return params


def check_gradients(
    module: nn.Module, x: Any, expected: Callable[..., np.ndarray], *groups: tuple[str, ...]
) -> None:
    """Check the gradients of groups of parameters against differences of a formula in float64."""
    params = drawn(module, x)
    found = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(module.apply(p, x)))))(params)["params"]
    rng = np.random.default_rng(1)
    p = float64(params["params"])

    def along(step: float, direction: Any) -> float:
        moved = jax.tree.map(lambda a, b: a + step * b, p, direction)
        return float(np.sin(expected(moved, x)).sum())

    for names in groups:
        zero = jax.tree.map(np.zeros_like, p)
        direction = zero | {
            n: jax.tree.map(lambda a: rng.normal(size=a.shape), p[n]) for n in names
        }
        slope = (along(1e-5, direction) - along(-1e-5, direction)) / 2e-5
        parts = jax.tree.map(lambda a, b: np.vdot(float64(a), b), found, direction)
        np.testing.assert_allclose(sum(jax.tree.leaves(parts)), slope, rtol=2e-5)
