"""What is measured: one attention, the values it gets, and what it costs at least."""

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
    """One self-attention: B sequences of T tokens, N heads, D features.

    Attributes:
      part: "layer" (projections included) or "core" (queries, keys and values are given).
      backward: also the gradients of sum(out·cotangent) by inputs and parameters.
      causal: a query sees itself and the tokens before.
      dtype: of inputs and parameters.
      window: a query sees the nearest `window` tokens, itself included, on each side that it may
        see; 0 for all.
      documents: how many are packed into each sequence, of which none sees another; 0 for one.
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
        """Features of a head."""
        return self.D // self.N

    @property
    def passes(self) -> str:
        """The name of what is computed."""
        return PASSES[self.backward]

    @property
    def mask(self) -> str:
        """The name of what a query may see."""
        name = MASKS[not self.causal]
        name = f"{name}, {self.documents} documents" if self.documents else name
        return f"{name} window {self.window}" if self.window else name

    def __str__(self) -> str:
        what = "forward + backward" if self.backward else "forward"
        groups = f" K={self.K}" if self.K else ""
        return f"{self.part}, {what}, {self.mask}, {self.dtype}, B={self.B} T={self.T}{groups}"

    def lengths(self) -> np.ndarray:
        """How many tokens each document has, int [documents]; the same in all sequences."""
        cuts = np.random.default_rng(4).permutation(self.T - 1)[: max(0, self.documents - 1)] + 1
        return np.diff(np.sort([0, *cuts, self.T]))

    def inputs(self) -> tuple[np.ndarray, ...]:
        """Of a layer, x [B, T, D]; of a core, q, k, v [B, T, N or K, H]."""
        rng = np.random.default_rng(1)
        sizes = [(n, self.H) for n in (self.N, self.K or self.N, self.K or self.N)]
        last: list[tuple[int, ...]] = [(self.D,)] if self.part == "layer" else [*sizes]
        return tuple(rng.standard_normal((self.B, self.T, *x), np.float32) for x in last)

    def cotangent(self) -> np.ndarray:
        """Of the output, which has the shape of an input."""
        return np.random.default_rng(2).standard_normal(self.inputs()[0].shape, np.float32)

    def parameters(self) -> Parameters:
        """A layer's, in Flax's layout: kernels [D, N, H] and [N, H, D], and biases."""
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
        """What the mathematics needs: of the scores, only those that the mask lets through.

        A product and a sum count as two. Backward needs twice the products of the projections,
        and 2.5 times those of the attention, with the scores computed again.
        """
        ahead = 0 if self.causal else 1
        seen = 0
        for T in self.lengths().tolist():
            reach = min(self.window or T, T)
            # Row i sees min(i + 1, reach) tokens up to itself, and as many beyond in mirror image.
            upto = reach * (reach + 1) // 2 + (T - reach) * reach
            seen += upto + ahead * (upto - T)
        core = 4.0 * self.B * seen * self.D * (3.5 if self.backward else 1.0)
        if self.part == "core":
            return core
        return core + 8.0 * self.B * self.T * self.D**2 * (3 if self.backward else 1)

    def score_bytes(self) -> int:
        """Roughly what a contestant that keeps all scores needs, beside inputs and outputs.

        Forward: scores and weights, and one in passing. Backward was measured at six times the
        scores; eight is on the safe side.
        """
        return 4 * self.B * self.N * self.T**2 * (8 if self.backward else 3)


def batch_for(T: int, tokens: int | None = None) -> int:
    """About so many tokens; unless said 2,048, in 8 sequences at most."""
    return max(1, min(8, 2048 // T) if tokens is None else tokens // T)
