"""Files of arrays."""

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from flax_mha.interop import safetensors


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a safetensors file."""
    entries = {n: (x, functools.partial(np.ascontiguousarray, x)) for n, x in arrays.items()}
    safetensors.write(path, entries)
