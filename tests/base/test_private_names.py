"""JAX's private names: the files that use them, when they load, and the behavior without them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from flax_mha import explain, kernels, sharding
from flax_mha.base import private_jax
from flax_mha.kernels.choose import KERNELS
from flax_mha.kernels.cudnn import primitives
from tests.support.platforms import pretend

ROOT = Path(__file__).parent.parent.parent
# The one file that uses each private module; only its kernel loads it.
HOMES = {
    "jax._src.cudnn": "kernels/cudnn/primitives.py",
    "splash_attention_kernel": "kernels/splash/__init__.py",
    "splash_attention_mask": "kernels/splash/computed_mask.py",
    "jax.interpreters": "kernels/call/only_on.py",
    "jax._src.core": "sharding/shard_map.py",
    "xla_metadata": "kernels/using.py",
}
PALLAS = "kernels/flex/"


def imported(path: Path) -> set[str]:
    """Return the names that a file imports, with their modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_private_imports_stay_in_their_files() -> None:
    seen = set()
    for path in (ROOT / "flax_mha").rglob("*.py"):
        here = path.relative_to(ROOT / "flax_mha").as_posix()
        for name in imported(path):
            if not name.startswith(("jax._src", "jax.interpreters", "jax.experimental")):
                continue
            dotted = f".{name}."
            home = next((home for part, home in HOMES.items() if f".{part}." in dotted), PALLAS)
            assert here.startswith(home), f"{here} imports {name}"
            seen.add(home)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr != "_src", here
    assert seen == {PALLAS, *HOMES.values()}


def test_private_jax_lists_every_used_attribute() -> None:
    """Every attribute of a private module that a kernel uses is listed in `private_jax.NAMES`."""
    modules = {"fused": "cudnn", "kernels": "splash",
               "splash": "splash", "pltpu": "flex.tpu", "plgpu": "flex.hopper", "ad": "only_on",
               "batching": "only_on", "mlir": "only_on", "metadata": "use",
               "tracing": "vmap"}  # fmt: skip
    listed = {
        part: {name.name.split(".")[0] for name in names}
        for part, names in private_jax.NAMES.items()
    }
    files = [ROOT / "flax_mha" / path for path in {*HOMES.values()}]
    for path in [*files, *(ROOT / "flax_mha" / PALLAS).rglob("*.py")]:
        if PALLAS in path.as_posix():
            modules["pl"] = f"flex.{path.parent.name}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                part = modules.get(node.value.id)
                assert part is None or node.attr in listed[part], f"{path}: {ast.unparse(node)}"


@pytest.mark.sampled(0.13, slow=0.2)
def test_cpu_call_loads_no_private_module() -> None:
    """Beyond the imports of flax and chex: no private module, no Pallas and no splash."""
    code = """
import sys, flax.linen, chex
import jax, jax.numpy as jnp
x = jnp.ones((1, 600, 2, 8))
jax.nn.dot_product_attention(x, x, x)
before = set(sys.modules)
import flax_mha
flax_mha.MultiHeadAttention, flax_mha.LanguageModel, flax_mha.generate, flax_mha.cache
plain = set(sys.modules) - before
jax.eval_shape(flax_mha.dot_product_attention, x, x, x)
assert "splash" in flax_mha.explain(x, x, x).refused
print(*plain, "|", *set(sys.modules) - before)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout  # fmt: skip
    imports, calls = (set(part.split()) for part in out.split("|"))
    assert not [name for name in imports if name.startswith(("jax._src", "jax.experimental"))]
    assert not [name for name in calls if "pallas" in name or "splash" in name]
    assert not {f"flax_mha.kernels.{name}" for name in ("cudnn", "flex", "splash")} & calls


# Old versions of JAX have not what the part of flex for Hopper needs.
KERNEL_PARTS = [
    part for part in private_jax.NAMES
    if part.partition(".")[0] in KERNELS
    and (part != "flex.hopper" or private_jax.missing(part) is None)
]  # fmt: skip
PARTS = [(part, name) for part in KERNEL_PARTS for name in private_jax.NAMES[part]]


@pytest.fixture
def fresh_check() -> Iterator[None]:
    """Clear the cached check of JAX's names before and after the test."""
    private_jax.missing.cache_clear()
    yield
    private_jax.missing.cache_clear()


def _owner(name: private_jax.Name) -> tuple[object, str]:
    owner = import_module(name.module)
    *path, last = name.name.split(".")
    if path:
        # For a member of an enumeration or a method of a primitive, remove its owner.
        return owner, path[0]
    return owner, last


def _refusal(monkeypatch: pytest.MonkeyPatch, part: str) -> str:
    """Return the part's refusal, and check which kernel auto chooses instead."""
    kernel = part.partition(".")[0]
    platform = "gpu" if part == "flex.hopper" else KERNELS[kernel].platforms[0]
    pretend(monkeypatch, platform)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(primitives, "gpu", lambda platform: ((9, 0), (9, 20, 0)))
    x = jax.ShapeDtypeStruct((2, 4096, 4, 64), jnp.bfloat16)
    found = explain(x, x, x)
    others = {"cudnn": "blockwise", "splash": "flex", "flex": "blockwise", "flex.tpu": "blockwise"}
    assert found.chosen == others.get(part, "cudnn")
    return found.refused[kernel]


@pytest.mark.parametrize(("part", "name"), PARTS, ids=lambda x: getattr(x, "name", x))
def test_kernel_refuses_without_its_private_name(monkeypatch, fresh_check, part, name) -> None:
    owner, attribute = _owner(name)
    monkeypatch.delattr(owner, attribute)
    assert f"has no {name.module}." in _refusal(monkeypatch, part)


@pytest.mark.parametrize(
    ("part", "name"), [(p, n) for p, n in PARTS if n.arguments], ids=lambda x: getattr(x, "name", x)
)
def test_kernel_refuses_if_private_function_changed_arguments(
    monkeypatch, fresh_check, part, name
) -> None:
    owner, attribute = _owner(name)
    old = getattr(owner, attribute)

    def changed(*args, new, **kwargs):
        return old(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, changed)
    assert "takes other arguments" in _refusal(monkeypatch, part)


@pytest.mark.parametrize("part", KERNEL_PARTS)
def test_kernel_refuses_without_its_private_module(monkeypatch, fresh_check, part) -> None:
    monkeypatch.setitem(sys.modules, private_jax.NAMES[part][0].module, None)
    assert "has no" in _refusal(monkeypatch, part)
    assert all(private_jax.missing(other) is None for other in ("blockwise", "reference", "decode"))


def test_use_without_metadata_names_remedy(monkeypatch, fresh_check) -> None:
    (name,) = private_jax.NAMES["use"]
    monkeypatch.delattr(*_owner(name))
    with pytest.raises(RuntimeError, match=r"has no .*set_xla_metadata.*; name kernel= in each"):
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
