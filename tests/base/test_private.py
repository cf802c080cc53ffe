"""JAX's private names: where they stand, when they are loaded, and what is left without them."""

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

from flax_mha import dot_product_attention, explain, kernels, sharding
from flax_mha.base import private_jax
from flax_mha.kernels.choose import KERNELS
from flax_mha.kernels.cudnn import primitives

ROOT = Path(__file__).parent.parent.parent
# Each stands in one file, which only its own kernel loads.
HOMES = {
    "jax._src.cudnn": "kernels/cudnn/primitives.py",
    "splash_attention_kernel": "kernels/splash/__init__.py",
    "splash_attention_mask_info": "kernels/splash/__init__.py",
    "splash_attention_mask": "kernels/splash/mask.py",
    "jax.interpreters": "kernels/limits.py",
    "xla_metadata": "kernels/derivatives.py",
}
PALLAS = "kernels/flex/"


def imported(path: Path) -> set[str]:
    """Names that a file imports, with their modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_private_imports_stand_in_their_places() -> None:
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


def test_the_table_names_what_is_used() -> None:
    """Every attribute taken of a private module stands in `private_jax.NAMES`."""
    modules = {"fused": "cudnn", "kernels": "splash", "mask_info": "splash", "splash": "splash",
               "pl": "flex", "pltpu": "flex", "ad": "limits", "batching": "limits",
               "mlir": "limits", "metadata": "any_derivative"}  # fmt: skip
    listed = {
        part: {name.name.split(".")[0] for name in names}
        for part, names in private_jax.NAMES.items()
    }
    files = [ROOT / "flax_mha" / path for path in {*HOMES.values()}]
    for path in [*files, *(ROOT / "flax_mha" / PALLAS).glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                part = modules.get(node.value.id)
                assert part is None or node.attr in listed[part], f"{path}: {ast.unparse(node)}"


def test_a_caller_on_a_cpu_loads_none_of_them() -> None:
    """Beside what flax and chex load: no private module through us, no Pallas, no splash."""
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
    assert not {f"flax_mha.kernels.{name}" for name in ("cudnn", "splash", "flex")} & calls


PARTS = [(part, name) for part in KERNELS for name in private_jax.NAMES.get(part, ())]


@pytest.fixture
def anew() -> Iterator[None]:
    """What is asked of JAX is asked again, here and after."""
    private_jax.missing.cache_clear()
    yield
    private_jax.missing.cache_clear()


def _owner(name: private_jax.Name) -> tuple[object, str]:
    owner = import_module(name.module)
    *path, last = name.name.split(".")
    if path:
        # Of an enumeration's members and a primitive's methods: what holds them goes.
        return owner, path[0]
    return owner, last


def _lost(monkeypatch: pytest.MonkeyPatch, part: str) -> str:
    """What the part's users see: the refusal of a kernel, and which kernel auto takes."""
    platform = KERNELS[part].platform
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(primitives, "gpu", lambda platform: primitives.Gpu((9, 0), (9, 20, 0)))
    x = jax.ShapeDtypeStruct((2, 4096, 4, 64), jnp.bfloat16)
    found = explain(x, x, x)
    assert found.chosen not in (None, part)
    assert found.chosen in {"cudnn": ["blockwise"], "splash": ["flex"], "flex": ["splash"]}[part]
    return found.refused[part]


@pytest.mark.parametrize(("part", "name"), PARTS, ids=lambda x: getattr(x, "name", x))
def test_without_a_name_its_kernel_refuses(monkeypatch, anew, part, name) -> None:
    owner, attribute = _owner(name)
    monkeypatch.delattr(owner, attribute)
    assert f"has no {name.module}." in _lost(monkeypatch, part)


@pytest.mark.parametrize(
    ("part", "name"), [(p, n) for p, n in PARTS if n.forms], ids=lambda x: getattr(x, "name", x)
)
def test_with_other_arguments_its_kernel_refuses(monkeypatch, anew, part, name) -> None:
    owner, attribute = _owner(name)
    old = getattr(owner, attribute)

    def changed(*args, new, **kwargs):
        return old(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, changed)
    assert "takes other arguments" in _lost(monkeypatch, part)


@pytest.mark.parametrize("part", [part for part in KERNELS if part in private_jax.NAMES])
def test_without_a_module_its_kernel_refuses(monkeypatch, anew, part) -> None:
    monkeypatch.setitem(sys.modules, private_jax.NAMES[part][0].module, None)
    assert "has no" in _lost(monkeypatch, part)
    assert all(private_jax.missing(other) is None for other in ("blockwise", "reference", "decode"))


@pytest.mark.parametrize("name", private_jax.NAMES["limits"], ids=lambda x: x.name)
def test_without_a_name_of_limits_the_error_is_that_of_jax(monkeypatch, anew, name) -> None:
    monkeypatch.delattr(*_owner(name))
    x = jnp.ones((1, 8, 1, 8))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: dot_product_attention(x, x, x, kernel="blockwise"), (x,), (x,))


def test_without_metadata_the_context_says_what_to_name(monkeypatch, anew) -> None:
    (name,) = private_jax.NAMES["any_derivative"]
    monkeypatch.delattr(*_owner(name))
    with pytest.raises(RuntimeError, match=r"has no .*set_xla_metadata.*'checkpointed'"):
        kernels.any_derivative().__enter__()


def test_what_varies_is_read_of_either_name(monkeypatch) -> None:
    """JAX moved it once; where it is gone, nothing is taken to vary."""
    axes = frozenset({"data"})
    for kind, expected in (
        (SimpleNamespace(mat=SimpleNamespace(varying=axes)), axes),
        (SimpleNamespace(vma=axes), axes),
        (SimpleNamespace(), frozenset()),
    ):
        monkeypatch.setattr(jax, "typeof", lambda x, kind=kind: kind)
        assert sharding.varying(jnp.ones(1)) == expected
