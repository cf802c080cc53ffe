"""The code in the documentation."""

import ast
import contextlib
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

ROOT = Path(__file__).parent.parent.parent
# Packages that pages use beside flax_mha; their blocks are skipped if they are not installed.
OPTIONAL = {"jax2onnx", "keras", "qwix", "torch"}


def read(page: str) -> str:
    """Return a page's text, by its path from the root."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str, text: str) -> list[str]:
    """Return the code between fences with this language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for name, code in fences if name == language]


def run(page: str) -> dict[str, Any]:
    """Run a page's Python from top to bottom, as a user does, and return its variables.

    Only the initial values of parameters differ: see `_drawn`.
    """
    scope: dict[str, Any] = {"__name__": Path(page).stem}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), _drawn():
        for code in blocks("python", read(page)):
            if not _lacks(code):
                exec(compile(code, page, "exec"), scope)
    return scope


@contextlib.contextmanager
def _drawn() -> Iterator[None]:
    """Make Flax's `init` draw parameters with NumPy, from traced shapes.

    JAX draws them op by op and compiles each op and shape, which would take half of the time.
    """
    init = nn.Module.init

    def draw(module: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        shapes = jax.eval_shape(lambda rngs: init(module, rngs, *args, **kwargs), rngs)
        if set(shapes) != {"params"}:
            return traced_init(module, rngs, *args, **kwargs)[1]
        rng = np.random.default_rng(0)

        def fill(x: Any) -> jax.Array:
            # Scales and biases near 1, kernels scaled by their number of rows.
            values = (x.ndim < 2) + 0.1 * rng.normal(size=x.shape)
            return jax.device_put(values.astype(x.dtype))

        return jax.tree.map(fill, shapes)

    def draw_and_apply(module: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        variables = module.init(rngs, *args, **kwargs)
        if set(variables) != {"params"}:  # A call would change the rest.
            return traced_init(module, rngs, *args, **kwargs)
        rngs = rngs if isinstance(rngs, dict) else {"params": rngs}
        return module.apply(variables, *args, rngs=rngs, **kwargs), variables

    apply, init_with_output = nn.Module.apply, nn.Module.init_with_output
    traced_init = _as_one_program(init_with_output)
    nn.Module.init, nn.Module.apply = _unless_traced(draw, init), _as_one_program(apply)
    nn.Module.init_with_output = _unless_traced(draw_and_apply, init_with_output)
    try:
        yield
    finally:
        nn.Module.init, nn.Module.apply = init, apply
        nn.Module.init_with_output = init_with_output


def _unless_traced(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Take a module's call in place of the original, where JAX traces none of its arguments."""

    @functools.wraps(original)
    def chosen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))
        return (original if traced else call)(module, *args, **kwargs)

    return chosen


def _as_one_program(call: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a module's call, whose first argument is an argument of the program."""

    def compiled(module: nn.Module, first: Any, *args: Any, **kwargs: Any) -> Any:
        return jax.jit(lambda first: call(module, first, *args, **kwargs))(first)

    return _unless_traced(compiled, call)


def _lacks(code: str) -> bool:
    """Return True if the code imports an optional package that is not installed."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import)]
    names = {alias.name for node in nodes for alias in node.names}
    return any(importlib.util.find_spec(name) is None for name in names & OPTIONAL)
