"""JAX's private names: the files that import them, when they load, and calls with and without."""

import ast
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_mha import Platform, dot_product_attention, explain, kernels, sharding
from flax_mha.kernels.flex.hopper import LACKING
from flax_mha.masks import Causal

ROOT = Path(__file__).parent.parent.parent / "flax_mha"
USE, VMAP = "kernels/using.py", "sharding/shard_map.py"
# The files that import private names. The names of Pallas in `kernels/flex` are documented.
HOMES = {
    "kernels/cudnn/primitives.py", "kernels/splash/__init__.py", "kernels/splash/computed_mask.py",
    "kernels/call/only_on.py", USE, VMAP,
}  # fmt: skip
PRIVATE = ("jax._src", "jax.interpreters", "jax.experimental")
GPU, TPU = Platform("gpu", "NVIDIA H200", cudnn=(9, 20, 0)), Platform("tpu", "TPU v5 lite")
# The platform of each kernel with names of its own, and the tokens of a call.
CALLS = {
    "cudnn": (GPU, 1024),
    "splash": (TPU, 1024),
    "flex on GPUs": (GPU, 1024),
    "flex on TPUs": (TPU, 1024),
    "short": (TPU, 256),
}


def private_names() -> Iterator[tuple[str, str, str]]:
    """Return each imported private name, with its file and its module."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE):
                for alias in node.names:
                    yield path.relative_to(ROOT).as_posix(), str(node.module), alias.name
            assert not (isinstance(node, ast.Attribute) and node.attr == "_src"), path
            if isinstance(node, ast.Import):
                assert not [x for x in node.names if x.name.startswith(PRIVATE)], path


NAMES = sorted(private_names())


def test_private_imports_stay_in_their_files() -> None:
    pallas = {file for file, *_ in NAMES} - HOMES
    assert {file for file, *_ in NAMES} >= HOMES
    assert all(file.startswith("kernels/flex/") for file in pallas)
    modules = {f"{module}.{name}" for file, module, name in NAMES if file in pallas}
    pallas_names = ("pallas", "pallas.tpu", "pallas.mosaic_gpu")
    assert modules == {f"jax.experimental.{name}" for name in pallas_names}


@pytest.mark.sampled(0.08)
def test_cpu_call_loads_no_private_module() -> None:
    """Beyond the imports of flax, chex and JAX's own attention: no Pallas and no splash."""
    code = """
import sys, flax.linen, chex, jax
x = jax.numpy.ones((1, 600, 2, 8))
jax.nn.dot_product_attention(x, x, x)
before = set(sys.modules)
import flax_mha
jax.eval_shape(flax_mha.dot_product_attention, x, x, x)
assert "splash" in flax_mha.explain(x, x, x).refused
print(*set(sys.modules) - before)
"""
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    ).stdout.split()
    assert not [name for name in loaded if "pallas" in name or "splash" in name]
    assert not {f"flax_mha.kernels.{name}" for name in ("cudnn", "flex", "splash")} & {*loaded}


@pytest.mark.parametrize("kernel", CALLS)
def test_each_private_name_is_called_as_this_jax_has_it(kernel: str) -> None:
    """Attention and its gradients are lowered for the kernel's platform, without a chip."""
    if kernel == "flex on GPUs" and LACKING:
        pytest.skip(LACKING)
    platform, T = CALLS[kernel]
    x = jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = dot_product_attention(q, k, v, mask=Causal(), kernel=kernel.split()[0])
        return out.sum(dtype=jnp.float32)

    with kernels.use(platform=platform):
        program = jax.jit(loss).trace(x, x, x)
        text = program.lower(lowering_platforms=({"gpu": "cuda"}.get(platform.name, "tpu"),))
    assert text.as_text().count("stablehlo.custom_call") >= 2


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that removes a name from a module of JAX."""

    def remove(module: str, name: str) -> None:
        monkeypatch.delattr(import_module(module), name)
        if f"{module}.{name}" in sys.modules:
            monkeypatch.setitem(sys.modules, f"{module}.{name}", None)

    return remove


@pytest.mark.parametrize(
    ("file", "module", "name"), [row for row in NAMES if row[0] in HOMES - {USE, VMAP}],
    ids=lambda x: x.rpartition(".")[2],
)  # fmt: skip
def test_kernel_refuses_without_a_private_name(
    monkeypatch: pytest.MonkeyPatch, without: Any, file: str, module: str, name: str
) -> None:
    kernel = "splash" if "splash" in file else "cudnn"
    platform, T = CALLS[kernel]
    x = jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)
    explain(x, x, x, platform=platform)
    user = "flax_mha." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for loaded in {user, f"flax_mha.kernels.{kernel}"}:
        monkeypatch.delitem(sys.modules, loaded)
    without(module, name)
    told = explain(x, x, x, platform=platform)
    assert "lacks what it needs" in told.refused[kernel]
    assert name in told.refused[kernel]
    assert told.chosen not in (kernel, None)


def test_use_without_metadata_names_remedy(without: Any) -> None:
    without("jax.experimental.xla_metadata", "set_xla_metadata")
    with pytest.raises(RuntimeError, match=r"set_xla_metadata.*; name kernel= in each"):
        kernels.use().__enter__()


def test_varying_axes_are_read_from_old_and_new_attribute(monkeypatch) -> None:
    """JAX renamed the attribute once. Without both, no axis counts as varying."""
    axes = frozenset({"data"})
    for kind, expected in (
        (SimpleNamespace(mat=SimpleNamespace(varying=axes)), axes),
        (SimpleNamespace(vma=axes), axes),
        (SimpleNamespace(), frozenset()),
    ):
        monkeypatch.setattr(jax, "typeof", lambda x, kind=kind: kind)
        assert sharding.varying(jnp.ones(1)) == expected
