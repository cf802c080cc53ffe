"""The measured cases: one attention, its inputs, and its minimum cost."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

PASSES = ("forward", "backward")
MASKS = ("causal", "full")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
    """One self-attention with B sequences of T tokens, N heads and D features.

    Attributes:
      part: "layer" (with projections), "core" (with given queries, keys and values), or "step" (a
        layer that decodes a token with a cache of T slots).
      passes: "forward", or "backward" to compute also the gradients by inputs and parameters, with
        the first input as the cotangent of the output.
      mask: "causal" if a query sees only itself and earlier tokens, or "full".
      dtype: the dtype of inputs and parameters.
      window: the number of nearest tokens that a query of ours sees on each visible side, itself
        included; 0 for all.
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

    def __str__(self) -> str:
        mask = f"{self.mask} window {self.window}" if self.window else self.mask
        return f"{self.part}, {self.passes}, {mask}, {self.dtype}, B={self.B} T={self.T}"

    def inputs(self) -> list[np.ndarray]:
        """Return a layer's x [B, T, D], or a core's q, k and v [B, T, N, H]."""
        rng = np.random.default_rng(1)
        sizes = [(self.N, self.H)] * 3 if self.part == "core" else [(self.D,)]
        return [rng.standard_normal((self.B, self.T, *x), np.float32) for x in sizes]

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
