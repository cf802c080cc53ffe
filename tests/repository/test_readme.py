"""The README's examples run and print what it says."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.support import pages

README = pages.read("README.md")
*EXAMPLES, PROGRAM = pages.blocks("python", README)


def printed_lines(program: str) -> str:
    """Return what the comments under the last print say."""
    return "".join(re.findall(r"^# (.*\n)", program.rpartition("\nprint(")[2], re.MULTILINE))


def run(program: str) -> str:
    # A process without the devices of these tests.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=pages.ROOT, env=environment, stdout=subprocess.PIPE,
        text=True, check=True,
    ).stdout  # fmt: skip


def test_examples_run() -> None:
    replaced, masked, with_nnx = EXAMPLES
    equal = """
import numpy as np
np.testing.assert_allclose(y, model.apply(variables, x), atol=1e-5)
"""
    shape = "\nassert tokens.shape == (2, 8)"
    assert run(replaced + equal + masked + with_nnx + shape) == printed_lines(masked)


@pytest.mark.slow
def test_program_trains_and_shards_heads() -> None:
    sharding, right = run(PROGRAM).rsplit(maxsplit=1)
    expected_sharding, expected_right = printed_lines(PROGRAM).rsplit(maxsplit=1)
    assert sharding == expected_sharding
    np.testing.assert_allclose(float(right), float(expected_right), atol=0.03)
