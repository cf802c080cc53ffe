"""Every page of the documentation runs from top to bottom, and its links lead somewhere."""

import ast
import contextlib
import functools
import importlib
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import interop, masks
from tests.repository import test_recipes
from tests.support import pages
from tests.support.decoding import cache_of

ROOT = pages.ROOT
Scope = dict[str, Any]
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
# Run by test_readme.py in steps, by test_pretrained.py, and by test_recipes.py for many tests.
ELSEWHERE = {"README.md", "docs/commands.md", *test_recipes.PAGES}
FAST = {"quickstart", "coming-from-flax", "coming-from-keras", "versions"}
RUNS = [
    pytest.param(page, marks=[] if Path(page).stem in FAST else [pytest.mark.slow])
    for page in PAGES
    if pages.blocks("python", pages.read(page)) and page not in ELSEWHERE
]


def own(scope: Scope) -> None:
    """Check that the mask skips the blocks that it hides, and check the score and the kernel."""
    q, k, v = scope["q"], scope["k"], scope["v"]
    attend, blocks = scope["dot_product_attention"], scope["Blocks"](64)
    poisoned = v.at[:, 128:].set(1e30)
    np.testing.assert_array_equal(
        attend(q, k, poisoned, mask=blocks, kernel="blockwise")[:, :128], scope["by_class"][:, :128]
    )
    for mask in (blocks, ~blocks, blocks & masks.Causal()):
        found, wanted = (attend(q, k, v, mask=mask, kernel=x) for x in ("blockwise", "reference"))
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    distance = np.sqrt(np.abs(np.subtract.outer(np.arange(300), np.arange(300))))
    weight = np.array([0.1, 0.2])
    score = scope["Distance"](weight.astype(np.float32))
    bias = (-weight[:, None, None] * distance).astype(np.float32)
    wanted = attend(q, k, v, bias=bias)
    np.testing.assert_allclose(attend(q, k, v, scores=(score,)), wanted, atol=1e-5)
    q, k, v = q[:, :7], k[:, :7], v[:, :7]
    phi = [np.where(x > 0, x + 1, np.exp(x)) for x in map(np.asarray, (q, k))]
    weights = np.einsum("btnh,bsnh->bnts", *phi)
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum("bnts,bsnh->btnh", weights, v)
    np.testing.assert_allclose(scope["linear_attention"](q, k, v), wanted, atol=1e-5)
    layer, variables, x = scope["own"], scope["variables_of_own"], scope["x"]
    cached = layer.clone(decode=True)
    step = functools.partial(cached.apply, mutable="cache")
    out, _ = step({**variables, "cache": cache_of(cached, x)}, x)
    np.testing.assert_allclose(out, layer.apply(variables, x, mask=masks.Causal()), atol=1e-5)


def size(module: Any, *inputs: Any) -> int:
    """Return the number of the module's parameters."""
    params = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def models(scope: Scope) -> None:
    """Check that the models have the sizes that their authors report."""
    tokens, image = np.zeros((1, 1), np.int32), np.zeros((1, 224, 224, 3), np.float32)
    table = (30522 + 512 + 2) * 768  # The tables of tokens, positions and segments.
    assert size(scope["bert"], np.zeros((1, 1, 768))) + table == 109_482_240 - 769 * 768
    assert size(scope["vit_base"], image) == 86_389_248 - 769 * 768  # Without the pooler.
    assert size(scope["clip_image"], image) == 87_456_000
    assert size(scope["siglip_image"], image) == 92_884_224 - 7_087_104
    assert size(scope["dinov3"], image) == 85_660_416 - 768  # Without the mask token.
    sizes = {
        "gpt2": 124_439_808, "llama31": 8_030_261_248, "mistral": 7_241_732_096,
        "qwen3": 596_049_920, "gemma2": 2_614_341_888, "gemma3": 999_885_952,
        "mixtral": 46_702_792_704, "gpt_oss": 20_914_757_184,
    }  # fmt: skip
    for name, wanted in sizes.items():
        # Scanned layers are traced once.
        model = scope[name].clone(decoder=scope[name].decoder.clone(scan=True))
        assert size(model, tokens) == wanted, name
    assert size(scope["t5"], tokens, tokens) == 222_903_552


def saved(scope: Scope) -> None:
    """Check that the page's code saves the state of a layer with dropout too."""
    layer = flax_mha.nnx.MultiHeadAttention(8, 64, dropout_rate=0.1, rngs=nnx.Rngs(3))
    shutil.rmtree("checkpoint")
    for code in pages.blocks("python", pages.read("docs/nnx.md")):
        if "serialization" in code or "checkpointer" in code:
            exec(code, scope | {"layer": layer})


# Checks of pages whose own lines do not show that their code is right.
CHECKS: dict[str, Callable[[Scope], None]] = {
    "docs/models.md": models, "docs/nnx.md": saved, "docs/own.md": own,
}  # fmt: skip


@pytest.mark.parametrize("page", RUNS)
def test_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "FAMILIES", dict(interop.FAMILIES))  # The page registers one.
    monkeypatch.chdir(tmp_path)  # Some pages create folders.
    scope = pages.run(page)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        CHECKS.get(page, lambda scope: None)(scope)


def test_quoted_code_is_that_of_its_file() -> None:
    """A block of `py` after a line with a path is code of this file, and is not run."""
    quotes = {page: pages.blocks("py", pages.read(page)) for page in PAGES}
    assert len(quotes["docs/training.md"]) > 8
    for page, blocks in quotes.items():
        named = re.findall(
            r"^`([\w/]+\.py)`:\n\n```py\n(.*?)^```", pages.read(page), re.DOTALL | re.M
        )
        assert [block for _, block in named] == blocks, page
        for path, block in named:
            lines = (ROOT / path).read_text().splitlines(keepends=True)
            size = block.count("\n")
            spans = ("".join(lines[i : i + size]) for i in range(len(lines)))
            assert block in map(textwrap.dedent, spans), (page, path, block)


def test_masks_are_drawn() -> None:
    """The build of the site draws each line of these blocks, 12 queries by 12 keys."""
    lines = re.findall(r"^~~~\{mask\}\n(.*?)^~~~", pages.read("docs/masks.md"), re.DOTALL | re.M)
    expressions = "".join(lines).splitlines()
    assert len(expressions) > 10
    for expression in expressions:
        mask = eval(expression, vars(masks) | {"np": np})
        drawing = mask.show(12).rpartition("\n")[0]
        assert set(drawing) == {"█", "·", "\n"}, expression


@pytest.mark.sampled(0)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path) -> None:
    """As a program. Each notebook asserts its claims."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, str(notebook)], cwd=ROOT, env=env, check=True, timeout=900)


def heading(line: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", line.lstrip("#").strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def test_links_and_commands_name_what_exists() -> None:
    for page in PAGES:
        text = re.sub(r"^(```|~~~).*?^\1", "", pages.read(page), flags=re.DOTALL | re.M)
        for link, anchor in re.findall(r"]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)]+))?\)", text):
            target = (ROOT / page).parent / link if link else ROOT / page
            assert target.exists(), (page, link)
            if anchor and target.suffix == ".md":
                lines = target.read_text(encoding="utf-8").splitlines()
                anchors = {heading(line) for line in lines if line.startswith("#")}
                assert anchor in anchors, (page, link, anchor)
        for module in re.findall(r"python -m (experiments\.[a-z]\w*)", pages.read(page)):
            assert importlib.util.find_spec(module), (page, module)
        for path in re.findall(r"(?:--config=|pytest .*)((?:configs|tests)/[\w/]+\.py)", text):
            assert (ROOT / path).is_file(), (page, path)


def test_inline_code_names_what_exists() -> None:
    """Attributes of modules, in code that stands in a sentence or a table."""
    names = "analysis cache edits interop kernels masks models plots positions scores sharding"
    modules = {name: importlib.import_module(f"flax_mha.{name}") for name in names.split()}
    modules |= {"flax_mha": flax_mha, "nnx": nnx}
    count = 0
    for page in PAGES:
        text = re.sub(r"^(```|~~~).*?^\1", "", pages.read(page), flags=re.DOTALL | re.M)
        for span in re.findall(r"`([^`\n]+(?<!\.py))`", text) if page != "CHANGELOG.md" else ():
            with contextlib.suppress(SyntaxError):
                for node in ast.walk(ast.parse(span.replace("…", "..."))):
                    if not isinstance(node, ast.Attribute):
                        continue
                    root, *path = ast.unparse(node).split(".")
                    if root in modules and all(map(str.isidentifier, path)):
                        functools.reduce(getattr, path, modules[root])
                        count += 1
    assert count > 100


def test_pages_with_meshes_set_the_number_of_devices() -> None:
    """A CPU is one device by default, and the pages' meshes need more."""
    for page in PAGES:
        code = "".join(pages.blocks("python", pages.read(page)))
        for sizes in re.findall(r"make_mesh\(\(([\d, ]+)\)", code):
            needed = math.prod(int(size) for size in sizes.split(",") if size.strip())
            settings = f"JAX_NUM_CPU_DEVICES={needed} ", f'("jax_num_cpu_devices", {needed})'
            assert any(x in pages.read(page) for x in settings), (page, sizes)


# Code that uses what the diffs of docs/architecture.md add.
ADDED = (
    "mask=masks.Global(37) & masks.Causal()",
    "scores=(scores.Kerple(np.array([1.0, 0.5]), np.array([2.0, 0.1])),)",
    None,
)
CALL = """
import numpy as np, jax, flax_mha
from flax_mha import masks, scores
q = np.random.default_rng(0).normal(size=(2, 300, 2, 4)).astype(np.float32)
attend = flax_mha.dot_product_attention
blockwise, reference = (attend(q, q, q, kernel=x, {}) for x in ("blockwise", "reference"))
np.testing.assert_allclose(blockwise, reference, atol=1e-5)
"""
OPTION = """
import numpy as np, jax, flax_mha
x = np.random.default_rng(0).normal(size=(2, 30, 8)).astype(np.float32)
layer = flax_mha.MultiHeadAttention(2, value_scale=3.0, use_bias=False)
variables = layer.init(jax.random.key(0), x)
out, plain = (layer.clone(value_scale=s).apply(variables, x) for s in (3.0, 1.0))
np.testing.assert_allclose(out, 3 * plain, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("git"), reason="needs git, to apply a diff")
@pytest.mark.parametrize(("number", "added"), [*enumerate(ADDED)])
def test_documented_changes_apply_and_work(number: int, added: str | None, tmp_path: Path) -> None:
    diff = pages.blocks("diff", pages.read("docs/architecture.md"))[number]
    for folder in ("flax_mha", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    code = CALL.format(added) if added else OPTION
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)
