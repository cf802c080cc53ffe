"""Random masks: expressions of `&`, `|` and `~`, and their tables."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
from hypothesis import strategies as st

from flax_mha.masks import Mask

Expression: TypeAlias = "str | tuple"
# A mask, and the table that it should give.
Meant: TypeAlias = tuple[Mask, np.ndarray]


def expressions(names: Iterable[str]) -> st.SearchStrategy[Expression]:
    """Build expressions over masks with these names."""
    return st.recursive(
        st.sampled_from(sorted(names)),
        lambda inner: st.one_of(
            st.tuples(st.just("~"), inner), st.tuples(st.sampled_from("&|"), inner, inner)
        ),
        max_leaves=6,
    )


def evaluate(expression: Expression, atom: Callable[[str], Meant]) -> Meant:
    """Return the mask that the operators build, and its table by NumPy."""
    if isinstance(expression, str):
        return atom(expression)
    operator, *operands = expression
    (mask, table), *rest = (evaluate(operand, atom) for operand in operands)
    if operator == "~":
        return ~mask, ~table
    ((other, other_table),) = rest
    return (mask & other, table & other_table) if operator == "&" else (
        mask | other, table | other_table
    )  # fmt: skip
