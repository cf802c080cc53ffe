"""The mask of block diffusion."""

import numpy as np

from flax_mha.base import checks
from flax_mha.masks.algebra import Mask
from flax_mha.masks.per_token import AtLeast, Segments


def block_diffusion(length: int, block: int) -> Mask:
    """Return the mask for training a language model by block diffusion.

    The sequence has `length` noisy tokens, then the same tokens clean, both in blocks. A noisy
    token may attend to its own noisy block and to earlier clean blocks, a clean token to its own
    clean block and earlier ones.

    Args:
      length: n, the number of noisy tokens, so that T = S = 2·n.
      block: the tokens of a block.

    Raises:
      ValueError: if a number is not positive, or, in a call, if T or S is not 2·n.

    Source: Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion
    Language Models", 2025.
    """
    checks.positive(length=length, block=block)
    at = np.arange(length, dtype=np.int32) // block
    none = np.full_like(at, -1)
    own_noise = Segments(np.concatenate([at, none]), np.concatenate([at, none - 1]))
    # Noisy keys have a number above that of any query.
    hidden = np.full_like(at, length)
    clean = AtLeast(np.concatenate([at - 1, at]), np.concatenate([hidden, at]))
    return own_noise | clean
