"""Score functions, which change the scores q·kᵀ·scale before the mask applies.

>>> layer = MultiHeadAttention(8, scores=(SoftCap(50.0), Alibi()))

They run in the order of the sequence. Like masks they are pytrees, and their arrays get gradients.

| function | the new score, from the score s of query i and key j |
|---|---|
| `Bias(array)` | s + array |
| `SoftCap(c)` | c·tanh(s / c) |
| `Alibi(slopes)` | s − slope·abs(i − j) |
| `RelativeBias(table)` | s + table[bucket(j − i)] (T5) |
| `Relative(table)` | s + scale·q·table[j − i] (Shaw et al., 2018) |
| `TransformerXL(u, v, kernel)` | s + the other three terms of Dai et al., 2019 |
| `Score(fn, args)` | fn(s, row, head, i, j, *args), with q and k before args if `vectors` |
"""

from flax_mha.base.coordinates import At
from flax_mha.scores.pointwise import Alibi, Bias, Score, SoftCap, alibi_slopes
from flax_mha.scores.relative import Relative, RelativeBias, TransformerXL, relative_bucket
from flax_mha.scores.score_mod import INIT, ScoreMod, Vectors, as_scores, changed, learned

__all__ = [
    "INIT", "Alibi", "At", "Bias", "Relative", "RelativeBias", "Score", "ScoreMod", "SoftCap",
    "TransformerXL", "Vectors", "alibi_slopes", "as_scores", "changed", "learned",
    "relative_bucket",
]  # fmt: skip
__dir__ = __all__.copy
