"""Score functions, which change the scores q·kᵀ·scale before the mask applies.

>>> layer = MultiHeadAttention(8, scores=(SoftCap(50.0), Alibi()))

They run in the order of the sequence. Like masks they are pytrees, and their arrays get gradients.
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
