"""Thousands of odd calls: each works, or raises an error of its arguments.

A call takes a public function and valid arguments, and replaces one or two of them by odd values.
"""

import traceback
import warnings
from typing import Any

import flax.errors
import jax
import pytest

from tests.support.fuzzing import TARGETS, Call, Traced, calls

CALLS, SAMPLE = 2500, 80
# Errors of Flax that are allowed, each with the reason.
EXCEPTIONS: tuple[tuple[type[Exception], str, str], ...] = (
    (flax.errors.FlaxError, "", "Flax keeps parameters and rngs, and names those that don't fit"),
)


def attempt(call: Call) -> Exception | None:
    """Return the exception that the call raises when traced, or None."""
    traced = {key: x for key, x in call.given.items() if isinstance(x, Traced)}
    structs = {key: jax.ShapeDtypeStruct(*x) for key, x in traced.items()}
    if "variables" in call.given and "variables" not in call.odd:
        structs["variables"] = call.given["variables"]

    def trace(arrays: dict[str, Any]) -> Any:
        return jax.tree.leaves(TARGETS[call.target][1](**call.given | arrays)) and None

    standard = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    try:
        with warnings.catch_warnings(), standard[0], standard[1]:
            warnings.simplefilter("ignore")
            jax.eval_shape(trace, structs)
    except Exception as error:
        return error
    return None


def complaint(error: Exception | None) -> str | None:
    """Return why this exception should not have been raised, or None."""
    if error is None:
        return None
    if any(isinstance(error, kind) and words in str(error) for kind, words, _ in EXCEPTIONS):
        return None
    if isinstance(error, ValueError | TypeError):
        return None
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}: {str(error)[:300]}"


def check(some: list[Call]) -> None:
    jax.config.update("jax_traceback_filtering", "off")
    try:
        wrong = [(call, found) for call in some if (found := complaint(attempt(call)))]
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    shown = [
        f"{call.target}({', '.join(f'{k}={call.given[k]!r:.90}' for k in call.odd)} …)\n    {found}"
        for call, found in wrong
    ]
    assert not wrong, f"{len(wrong)} of {len(some)} calls\n" + "\n".join(shown)


def test_sample_of_odd_calls_raises_only_errors_of_arguments() -> None:
    check(list(calls(SAMPLE)))


@pytest.mark.sampled(0)
def test_odd_calls_raise_only_errors_of_arguments() -> None:
    check(list(calls(CALLS))[SAMPLE:])


@pytest.mark.slow
def test_valid_calls_raise_nothing() -> None:
    """Calls without odd values must pass, or the other tests would show nothing."""
    for name, (_, _, needed, _) in TARGETS.items():
        assert attempt(Call(name, needed, ())) is None, name
