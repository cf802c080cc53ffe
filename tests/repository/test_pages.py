"""Every page of the documentation runs from top to bottom, and figures name their command."""

import dataclasses
import functools
import importlib
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

from flax_mha import Decoder, Encoder, interop, masks
from tests.repository import test_recipes
from tests.support import pages
from tests.support.decoding import cache_of

ROOT = pages.ROOT
Scope = dict[str, Any]
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
# Run by test_readme.py in two steps, and by test_recipes.py once for many tests.
ELSEWHERE = {"README.md", *test_recipes.PAGES}
SLOW_NAMES = (
    "coming-from-huggingface", "coming-from-pytorch", "conventions", "decoding", "fine-tune",
    "interop", "kernels", "look-inside", "masks", "models", "nnx", "own",
    "performance", "sharding", "variants",
)  # fmt: skip
SLOW = {f"docs/{name}.md" for name in SLOW_NAMES}


def quickstart(scope: Scope) -> None:
    """The attention's parameters stand in their block, as the comments say."""
    mine = scope["mine"]
    assert mine.keys() == {"Dense_0", "block", "EncoderBlock_0"}
    assert all("query" in mine[name]["attention"] for name in ("block", "EncoderBlock_0"))


def sharding(scope: Scope) -> None:
    y, out = scope["y"], scope["out"]
    assert y.sharding.spec[0] == "data"
    assert out.sharding.spec[0] == ("dcn", "data")
    expected = scope["model"].apply(jax.device_get(scope["variables"]), scope["x"])
    for found in (y, out):
        np.testing.assert_allclose(jax.device_get(found), expected, atol=1e-5)


def decoding(scope: Scope) -> None:
    np.testing.assert_array_equal(scope["cache"].free(scope["held"]), [9, 12])
    np.testing.assert_array_equal(scope["cache"].free(scope["best_of_3"]), [9] * 3 + [12] * 3)
    assert 0.001 < scope["moved"](64, 32) < 0.02


def tuned(scope: Scope) -> None:
    """The first step of linen and of nnx is the same, and frozen parameters get no update."""
    np.testing.assert_allclose(scope["loss"], scope["same_loss"], rtol=1e-6)
    first, second = (interop.load(name)[1] for name in ("tuned", "tuned-in-nnx"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), first, second)
    params, optimizer = scope["params"], scope["attention_alone"]
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        assert np.any(update) == ("attention" in jax.tree_util.keystr(path)), path


def look_inside(scope: Scope) -> None:
    """Check the captured values and their changes, and that the circuit does what the page says."""
    values, path = scope["values"], "decoder/layers_0/attention/attention_"
    weights, entropy = (np.asarray(values[path + name]) for name in ("weights", "entropy"))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    logs = np.log(np.where(weights > 0, weights, 1))
    np.testing.assert_allclose(entropy, -(weights * logs).sum(-1), atol=1e-5)
    assert Path("heads.html").stat().st_size > 10_000
    assert np.abs(scope["edited"] - scope["logits"]).max() > 1e-3
    (importance,) = scope["importance"].values()
    assert importance.keep.shape == (8, 1)
    keep = np.ones((2, 8))
    keep[0, [1, 5]] = keep[1, [0, 6]] = 0
    masked = scope["watched"].apply(scope["variables"], scope["tokens"], head_mask=[*keep])
    np.testing.assert_allclose(scope["pruned"], masked, atol=1e-5)
    assert scope["effects"].shape == (2, 4)
    # The model answers without one induction head, and not without the heads of the circuit.
    nothing, strongest, *rest = scope["found"].values()
    assert nothing > 0.95
    assert strongest > 0.9
    assert max(rest) < 0.6


def from_hugging_face(scope: Scope) -> None:
    """The padded text continues as it does alone."""
    model, variables, ids = scope["model"], scope["variables"], scope["ids"]
    alone = scope["generate"](model, variables, ids[1:, -4:], max_new_tokens=8)
    np.testing.assert_array_equal(scope["both"].tokens[1], alone.tokens[0])
    assert [x.shape for x in scope["attentions"]] == [(2, 8, 24, 24)] * 2
    assert len(scope["hidden_states"]) == 3


def in_nnx(scope: Scope) -> None:
    np.testing.assert_allclose(scope["same"], scope["layer"](scope["x"]), atol=1e-6)
    np.testing.assert_allclose(scope["prompt"], scope["same"], atol=1e-5)
    assert scope["following"].shape == (2, 1, 64)
    assert scope["weights"].shape == (2, 8, 10, 10)
    assert scope["sharded"].query.kernel[...].sharding.spec == jax.P(None, "model")
    assert scope["over_rows"].sharding.spec == jax.P("batch")
    assert scope["written"].shape == (2, 6)
    assert jax.tree.structure(scope["restored"]) == jax.tree.structure(
        nnx.to_pure_dict(scope["state"])
    )


def from_folders(scope: Scope) -> None:
    assert scope["tokens"].shape == (1, 5)
    jax.tree.map(np.testing.assert_array_equal, scope["loaded"], scope["saved"])


def variants(scope: Scope) -> None:
    assert scope["tokens"].shape == (1, 5)


def own_layer(scope: Scope) -> None:
    own, variables, x = scope["own"], scope["variables_of_own"], scope["x"]
    assert variables["params"]["value_norm"]["scale"].shape == (16,)
    cached = own.clone(decode=True)
    step = jax.jit(functools.partial(cached.apply, mutable="cache"))
    found, _ = step({**variables, "cache": cache_of(cached, x)}, x)
    wanted = own.apply(variables, x, mask=masks.Causal())
    np.testing.assert_allclose(found, wanted, atol=1e-5)


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
    found = attend(q, k, v, scores=(scope["Distance"](weight.astype(np.float32)),))
    bias = (-weight[:, None, None] * distance).astype(np.float32)
    np.testing.assert_allclose(found, attend(q, k, v, bias=bias), atol=1e-5)
    q, k, v = q[:, :7], k[:, :7], v[:, :7]
    phi = [np.where(x > 0, x + 1, np.exp(x)) for x in map(np.asarray, (q, k))]
    weights = np.einsum("btnh,bsnh->bnts", *phi)
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum("bnts,bsnh->btnh", weights, v)
    np.testing.assert_allclose(scope["linear_attention"](q, k, v), wanted, atol=1e-5)
    own_layer(scope)


def scanned(module: nn.Module) -> nn.Module:
    """Return the model with its stacks scanned, so that they are traced once. Its size is equal."""
    if isinstance(module, (Encoder, Decoder)):
        return module.clone(scan=True)
    parts = {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}
    parts = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    return module.clone(**{name: scanned(x) for name, x in parts.items() if name != "parent"})


def size(module: Any, *given: Any) -> int:
    """Return the number of the module's parameters."""
    found = jax.eval_shape(scanned(module).init, jax.random.key(0), *given)["params"]
    return sum(math.prod(x.shape) for x in jax.tree.leaves(found))


def models(scope: Scope) -> None:
    """Check that the models have the sizes that their authors report."""
    for code in pages.blocks("python", pages.read("docs/models.md")):
        assert all(len(part.strip().splitlines()) <= 12 for part in code.split("\n\n"))
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
    assert {name: size(scope[name], tokens) for name in sizes} == sizes
    assert size(scope["t5"], tokens, tokens) == 222_903_552
    encoder = size(scope["whisper_encoder"], np.zeros((1, 1, 384)))
    decoder = size(scope["whisper_decoder"], tokens, np.zeros((1, 1, 384)))
    sound = (3 * 80 + 1 + 3 * 384 + 1 + 1500) * 384
    assert encoder + decoder + sound == 37_760_640
    assert size(scope["qwen3_next"], np.zeros((1, 2, 2048))) > 0


# Checks that a page's own code does not make.
CHECKS: dict[str, Callable[[Scope], None]] = {
    "docs/coming-from-huggingface.md": from_hugging_face,
    "docs/decoding.md": decoding,
    "docs/fine-tune.md": tuned,
    "docs/interop.md": from_folders,
    "docs/look-inside.md": look_inside,
    "docs/models.md": models,
    "docs/nnx.md": in_nnx,
    "docs/own.md": own,
    "docs/quickstart.md": quickstart,
    "docs/sharding.md": sharding,
    "docs/variants.md": variants,
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
        for page in PAGES
        if pages.blocks("python", pages.read(page)) and page not in ELSEWHERE
    ],
)
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


@pytest.mark.sampled(0, slow=0.3)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path) -> None:
    """As a program. Each notebook asserts its claims."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, str(notebook)], cwd=ROOT, env=env, check=True, timeout=180)


def test_commands_in_pages_name_existing_files() -> None:
    for page in PAGES:
        text = pages.read(page)
        for module in re.findall(r"python -m (experiments\.[a-z]\w*)", text):
            assert importlib.util.find_spec(module), (page, module)
        for path in re.findall(r"--config=(configs/\w+\.py)", text):
            assert (ROOT / path).is_file(), (page, path)


def test_pages_with_meshes_set_the_number_of_devices() -> None:
    """A CPU is one device by default, and the pages' meshes need more."""
    for page in PAGES:
        code = "".join(pages.blocks("python", pages.read(page)))
        for sizes in re.findall(r"make_mesh\(\(([\d, ]+)\)", code):
            needed = math.prod(int(size) for size in sizes.split(",") if size.strip())
            settings = f"JAX_NUM_CPU_DEVICES={needed} ", f'("jax_num_cpu_devices", {needed})'
            assert any(x in pages.read(page) for x in settings), (page, sizes)


def is_figure(block: str) -> bool:
    """Return True for a picture, or a table with mostly numbers in its cells."""
    if re.search(r"!\[[^]]*\]\([^)]*\.png\)", block):
        return True
    rows = [line for line in block.splitlines() if line.startswith("|")][2:]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)[2:-1]]
    numbers = [cell for cell in cells if re.match(r"[−-]?\d", cell)]
    return bool(cells) and len(numbers) > len(cells) / 2


@pytest.mark.parametrize("page", PAGES)
def test_figures_stand_beside_their_command(page: str) -> None:
    for section in re.split(r"^(?=## )", pages.read(page), flags=re.MULTILINE):
        if any(is_figure(block) for block in section.split("\n\n")):
            command = re.search(r"python -m\s+experiments\.\w+|^```python", section, re.MULTILINE)
            assert command, section[:200]


def test_every_picture_is_shown_on_a_page() -> None:
    shown = "".join(pages.read(page) for page in PAGES)
    for path in (ROOT / "docs").rglob("*.png"):
        assert re.search(rf"!\[[^]]+\]\([\w./]*{path.name}\)", shown), path
