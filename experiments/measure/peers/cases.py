"""The measured cases: one attention, its inputs, and its minimum cost."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

PARTS = ("layer", "core")
PASSES = ("forward", "backward")
MASKS = ("causal", "full", "packed")
DTYPES = ("float32", "bfloat16", "float16")
Parameters = Mapping[str, Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One self-attention with B sequences of T tokens, N heads and D features.

    Attributes:
      part: "layer" (with projections) or "core" (with given queries, keys and values).
      backward: True to compute also the gradients of sum(out·cotangent) by inputs and parameters.
      causal: True if a query sees only itself and earlier tokens.
      dtype: the dtype of inputs and parameters.
      window: the number of nearest tokens that a query sees on each visible side, itself included;
        0 for all.
      documents: the number of documents packed into each sequence, isolated from each other; 0 for
        one.
      K: key/value heads of a core; 0 for N.
    """

    part: str
    backward: bool
    causal: bool
    B: int
    T: int
    dtype: str = "float32"
    N: int = 8
    D: int = 512
    window: int = 0
    documents: int = 0
    K: int = 0

    @property
    def H(self) -> int:
        """The features of a head."""
        return self.D // self.N

    @property
    def passes(self) -> str:
        """The name of the computed passes."""
        return PASSES[self.backward]

    @property
    def mask(self) -> str:
        """The name of the mask."""
        name = MASKS[not self.causal]
        name = f"{name}, {self.documents} documents" if self.documents else name
        return f"{name} window {self.window}" if self.window else name

    def __str__(self) -> str:
        passes = "forward + backward" if self.backward else "forward"
        groups = f" K={self.K}" if self.K else ""
        return f"{self.part}, {passes}, {self.mask}, {self.dtype}, B={self.B} T={self.T}{groups}"

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, int [documents], the same in all
        sequences.
        """
        cuts = np.random.default_rng(4).permutation(self.T - 1)[: max(0, self.documents - 1)] + 1
        return np.diff(np.sort([0, *cuts, self.T]))

    def inputs(self) -> tuple[np.ndarray, ...]:
        """Return a layer's x [B, T, D], or a core's q, k and v [B, T, N or K, H]."""
        rng = np.random.default_rng(1)
        sizes = [(n, self.H) for n in (self.N, self.K or self.N, self.K or self.N)]
        last: list[tuple[int, ...]] = [(self.D,)] if self.part == "layer" else [*sizes]
        return tuple(rng.standard_normal((self.B, self.T, *x), np.float32) for x in last)

    def cotangent(self) -> np.ndarray:
        """Return the cotangent of the output, which has the shape of an input."""
        return np.random.default_rng(2).standard_normal(self.inputs()[0].shape, np.float32)

    def parameters(self) -> Parameters:
        """Return a layer's parameters in Flax's layout: kernels [D, N, H], [N, H, D] and biases."""
        rng = np.random.default_rng(3)
        heads = (self.N, self.H)
        shapes = dict.fromkeys(("query", "key", "value"), ((self.D, *heads), heads))
        return {
            name: {
                "kernel": rng.standard_normal(kernel, np.float32) / math.sqrt(self.D),
                "bias": rng.standard_normal(bias, np.float32),
            }
            for name, (kernel, bias) in (shapes | {"out": ((*heads, self.D), (self.D,))}).items()
        }

    def flops(self) -> float:
        """Return the necessary operations, counting only the scores that the mask lets through.

        A multiplication and an addition count as two. The backward pass needs twice the operations
        of the projections and 2.5 times the attention's, with the scores computed again.
        """
        ahead = 0 if self.causal else 1
        seen = 0
        for T in self.lengths().tolist():
            reach = min(self.window or T, T)
            # Query i sees min(i + 1, reach) tokens up to itself; the other side mirrors that.
            upto = reach * (reach + 1) // 2 + (T - reach) * reach
            seen += upto + ahead * (upto - T)
        core = 4.0 * self.B * seen * self.D * (3.5 if self.backward else 1.0)
        if self.part == "core":
            return core
        return core + 8.0 * self.B * self.T * self.D**2 * (3 if self.backward else 1)

    def score_bytes(self) -> int:
        """Estimate the bytes of all scores in a contestant that keeps them.

        Forward: scores, weights and one temporary array. Backward was measured at six times the
          scores;
        eight is on the safe side.
        """
        return 4 * self.B * self.N * self.T**2 * (8 if self.backward else 3)


def batch_for(T: int, tokens: int | None = None) -> int:
    """Return the batch size for about this many tokens (default: 2,048 in at most 8 sequences)."""
    return max(1, min(8, 2048 // T) if tokens is None else tokens // T)
