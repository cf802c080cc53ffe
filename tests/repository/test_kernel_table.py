"""The table of docs/kernels.md says which kernel takes which call, as `explain` answers.

Each kernel is asked for a platform that it runs on, present or not. Nothing runs.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import explain, masks, scores
from flax_mha.kernels import Platform
from tests.support.arrays import zeros
from tests.support.pages import read

PAGE = read("docs/kernels.md")
GPU, TPU = Platform("gpu", "NVIDIA H200", cudnn=(9, 20, 0)), Platform("tpu", "TPU v5 lite")
COLUMNS = {
    "`cudnn`": ("cudnn", GPU), "`short`": ("short", TPU), "`flex`, TPU": ("flex", TPU),
    "`flex`, NVIDIA GPU": ("flex", GPU), "`splash`": ("splash", TPU),
    "`blockwise`": ("blockwise", Platform("cpu")),
}  # fmt: skip
B, T, N, H = 2, 256, 4, 64
BLOCKS = np.kron(np.eye(4), np.ones((T // 4, T // 4))) > 0


def calls() -> dict[str, dict[str, Any]]:
    """Return changes to a plain bfloat16 call, by the names in the table.

    `dtype` and `H` are its sizes, the others its arguments. JAX arrays stand for traced ones.
    """
    return {
        "float16": {"dtype": "float16"},
        "float32": {"dtype": "float32"},
        "`precision`": {"precision": "highest"},
        "heads of 512": {"H": 512},
        "`Causal` of traced positions": {"mask": masks.Causal(), "q_positions": zeros(T, int)},
        "`Lengths` for each query": {"mask": masks.Lengths(zeros((B, T), int))},
        "`Dense`, traced": {"mask": masks.Dense(jax.device_put(BLOCKS))},
        "`PerHead`": {"mask": masks.PerHead([masks.Causal(), masks.Window(64, 0)] * 2)},
        "`bias` [T, S] in bfloat16": {"bias": zeros((T, T), jnp.bfloat16)},
        "`bias` of keys, [S]": {"bias": zeros(T, jnp.bfloat16)},
        "`Score`, your own": {"scores": (scores.Score(lambda s, b, n, i, j: s * 0.5),)},
        "`RelativeBias` (T5)": {"scores": (scores.RelativeBias(zeros((N, 32))),)},
        "`SoftCap`": {"scores": (scores.SoftCap(50.0),)},
        "`Relative`": {"scores": (scores.Relative(zeros((33, H))),)},
        "`TransformerXL`": {
            "scores": (scores.TransformerXL(zeros((N, H)), zeros((N, H)), zeros((N * H, N, H))),)
        },
        "`sinks`": {"sinks": zeros(N)},
        "`normalizer`, no softmax": {"normalizer": "sigmoid"},
        "dropout": {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
        "returned lse": {"return_residuals": True},
    }  # fmt: skip


def traced(fn: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Return fn(**call), with the call's JAX arrays as arguments of the traced program."""
    leaves, tree = jax.tree.flatten(call)
    results = []

    def run(arrays: dict[int, jax.Array]) -> None:
        inputs = [arrays.get(n, x) for n, x in enumerate(leaves)]
        results.append(fn(**jax.tree.unflatten(tree, inputs)))

    jax.eval_shape(run, {n: x for n, x in enumerate(leaves) if isinstance(x, jax.Array)})
    return results[0]


def refusal(name: str, platform: Platform, call: dict[str, Any]) -> str | None:
    """Return the reason why a kernel refuses a call, or None if it takes it."""
    call = {"dtype": "bfloat16", "H": H} | call
    x = jax.ShapeDtypeStruct((B, T, N, call.pop("H")), call.pop("dtype"))
    ask = functools.partial(explain, x, x, x, platform=platform, kernel=cast(Any, name))
    reason = traced(ask, call).refused.get(name)
    if reason:  # Remove the value from the message.
        reason = re.sub(r"(,|;) (got|here) .*?(?=;|$)", "", reason)
        reason = re.sub(r"^\w+ holds", "the mask holds", reason)
    return reason


def rows() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each feature of the page's table, and what it says of each kernel."""
    for line in re.findall(r"^\| (.*(?:✓|\(\d+\)) )\|$", PAGE, re.M):
        features, *cells = re.split(r" ?\| ", line.strip())
        for feature in features.split("; "):
            yield feature, dict(zip(COLUMNS, cells, strict=True))


@pytest.mark.sampled(0)
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="this JAX's cuDNN has no soft caps")
def test_page_says_what_explain_says() -> None:
    notes = {f"({n})": reason for n, reason in re.findall(r"^(\d+)\. (.*)$", PAGE, re.M)}
    table = dict(rows())
    for name, call in calls().items():
        found = {title: refusal(*COLUMNS[title], call) for title in COLUMNS}
        assert found == {title: notes.get(cell) for title, cell in table[name].items()}, name
        assert refusal("reference", Platform("cpu"), call) is None, name
