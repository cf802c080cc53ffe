"""Programs over flax_mha, each runnable as `python -m experiments.NAME`."""

import sys

from experiments.common import libtpu, phases

if sys.argv[0] == "-m":  # The value while Python looks for the module of `python -m`.
    phases.begin(sys.argv[1:])

libtpu.compiler_only()
