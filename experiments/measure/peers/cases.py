"""The measured cases: one attention, its inputs, and its minimum cost."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PASSES = ("forward", "backward")
MASKS = ("causal", "full")
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Case:
    """One self-attention with B sequences of T tokens, N heads and D features.

    Attributes:
      part: "layer" (with projections), "core" (with given queries, keys and values), or "step" (a
        layer that decodes a token with a cache of T slots).
      passes: "forward", or "backward" to compute also the gradients of sum(out·cotangent) by inputs
        and parameters.
      mask: "causal" if a query sees only itself and earlier tokens, or "full".
      dtype: the dtype of inputs and parameters.
      window: the number of nearest tokens that a query sees on each visible side, itself included;
        0 for all.
    """

    part: str
    passes: str
    mask: str
    B: int
    T: int
    dtype: str = "float32"
    N: int = 8
    D: int = 512
    window: int = 0

    @property
    def H(self) -> int:
        """The features of a head."""
        return self.D // self.N

    @property
    def causal(self) -> bool:
        """True if a query sees no later tokens."""
        return self.mask == "causal"

    @property
    def backward(self) -> bool:
        """True if gradients are computed."""
        return self.passes == "backward"

    @property
    def near(self) -> tuple[int, int] | None:
        """The number of earlier and of later tokens in the window, or None for all."""
        reach = self.window - 1
        return (reach, 0 if self.causal else reach) if self.window else None

    def __str__(self) -> str:
        mask = f"{self.mask} window {self.window}" if self.window else self.mask
        return f"{self.part}, {self.passes}, {mask}, {self.dtype}, B={self.B} T={self.T}"

    def inputs(self) -> list[np.ndarray]:
        """Return a layer's x [B, T, D], or a core's q, k and v [B, T, N, H]."""
        rng = np.random.default_rng(1)
        sizes = [(self.N, self.H)] * 3 if self.part == "core" else [(self.D,)]
        return [rng.standard_normal((self.B, self.T, *x), np.float32) for x in sizes]

    def cotangent(self) -> np.ndarray:
        """Return the cotangent of the output, which has the shape of an input."""
        return np.random.default_rng(2).standard_normal(self.inputs()[0].shape, np.float32)

    def projections(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the matrices [in, out] and the biases of query, key, value and output."""
        numbers, D = np.random.default_rng(3).standard_normal, self.D
        return [(numbers((D, D), np.float32) / math.sqrt(D), numbers(D, np.float32))
                for _ in range(4)]  # fmt: skip

    def parameters(self, tree: Any, order: str = "koqv", transposed: bool = False) -> Any:
        """Return the parameters of a layer, in the form of its own.

        Args:
          tree: the parameters of the layer, or their shapes.
          order: the order of the projections in the tree; that of names by default.
          transposed: True if its matrices are [out, in].
        """
        leaves, form = jax.tree.flatten(tree)
        given = dict(zip("qkvo", self.projections(), strict=True))
        arrays = []
        for leaf, name in zip(leaves, np.repeat([*order], 2), strict=True):
            kernel, bias = given[name]
            array = bias if leaf.size == self.D else kernel.T if transposed else kernel
            arrays.append(array.reshape(leaf.shape))
        return jax.tree.unflatten(form, arrays)

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and the last key that each query sees, int [T] each."""
        i, reach = np.arange(self.T), (self.window or self.T) - 1
        return np.maximum(0, i - reach), i if self.causal else np.minimum(self.T - 1, i + reach)

    def visible(self, xp: Any = jnp) -> Any:
        """Return the keys that each query sees, bool [T, T], or None for all of them.

        `xp` is `jnp` or `numpy`.
        """
        if not (self.causal or self.window):
            return None
        first, last = (xp.asarray(x)[:, None] for x in self.seen())
        return (first <= xp.arange(self.T)) & (xp.arange(self.T) <= last)

    def amounts(self) -> dict[str, float]:
        """Return the necessary operations, counting only the scores that the mask lets through.

        A multiplication and an addition count as two. The backward pass needs twice the operations
        of the projections and 2.5 times the attention's, with the scores computed again.
        """
        first, last = self.seen()
        flops = 4.0 * self.B * (last - first + 1).sum() * self.D * (3.5 if self.backward else 1)
        if self.part == "layer":
            flops += 8.0 * self.B * self.T * self.D**2 * (3 if self.backward else 1)
        return {"TFLOP": flops / 1e12}

    def step_amounts(
        self, filled: int, tokens: int = 1, stored: str | None = None
    ) -> dict[str, float]:
        """Return the tokens of a step, and what it must read: keys, values and four projections."""
        own = jnp.dtype(self.dtype).itemsize
        held = jnp.dtype(stored).itemsize + 4 / self.H if stored else own
        size = 2 * self.B * filled * self.D * held + 4 * self.D**2 * own
        return {"GB": size / 1e9, "tokens": self.B * tokens}

    def score_bytes(self) -> int:
        """Estimate the bytes of all scores in a contestant that keeps them.

        A forward pass has the scores, the weights and one temporary array. Gradients were measured
        at six times the scores; eight is on the safe side.
        """
        return 4 * self.B * self.N * self.T**2 * (8 if self.backward else 3)
