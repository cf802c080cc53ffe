"""Inputs and random parameters of tests that remove heads."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np

from tests.support.oracle import random_like

N, D, T = 4, 16, 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, T, D)).astype(np.float32)
IDS = RNG.integers(0, 20, (2, T))
KEY = jax.random.key(0)


def drawn(module: Any, *inputs: Any) -> Any:
    """Return random parameters, boxed where the module boxes them."""
    shapes = jax.eval_shape(module.init, KEY, *inputs)
    values = random_like(nn.unbox({"params": shapes["params"]}))
    return nn.meta.replace_boxed({"params": shapes["params"]}, values)
