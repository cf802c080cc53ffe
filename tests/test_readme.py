"""The README's example runs, its commands are those of CI, and its tree is the tree."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import interop, masks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


def test_the_examples_run() -> None:
    first, on_a_mesh = blocks("python")
    assert sum(1 for line in first.splitlines() if line.strip()) <= 10
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(first, scope)
        plain = scope["y"]
        exec(on_a_mesh, scope)
    assert plain.shape == (2, 10, 64)
    np.testing.assert_allclose(jax.device_get(scope["y"]), plain, atol=1e-5)


@pytest.mark.slow
def test_the_page_on_sharding_runs() -> None:
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        for code in blocks("python", (ROOT / "docs" / "sharding.md").read_text()):
            exec(code, scope)
    y = scope["y"]
    assert y.sharding.spec[0] == "data"
    expected = scope["model"].apply(jax.device_get(scope["variables"]), scope["x"])
    np.testing.assert_allclose(jax.device_get(y), expected, atol=1e-5)


@pytest.mark.slow
def test_the_page_on_decoding_runs() -> None:
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for code in blocks("python", (ROOT / "docs" / "decoding.md").read_text()):
            exec(code, scope)
    np.testing.assert_array_equal(scope["cache"].free(scope["held"]), [9, 12])
    np.testing.assert_array_equal(scope["cache"].free(scope["best_of_3"]), [9] * 3 + [12] * 3)


@pytest.mark.slow
def test_the_page_on_nnx_runs() -> None:
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        for code in blocks("python", (ROOT / "docs" / "nnx.md").read_text()):
            exec(code, scope)
    np.testing.assert_allclose(scope["same"], scope["layer"](scope["x"]), atol=1e-6)
    np.testing.assert_allclose(scope["prompt"], scope["same"], atol=1e-5)
    assert scope["following"].shape == (2, 1, 64)


def test_the_page_on_interop_runs(tmp_path: Path) -> None:
    scope: dict = {"folder": tmp_path}
    families = dict(interop.FAMILIES)
    try:
        with jax.numpy_dtype_promotion("standard"):
            for code in blocks("python", (ROOT / "docs" / "interop.md").read_text()):
                exec(code, scope)
    finally:
        interop.FAMILIES.clear()
        interop.FAMILIES.update(families)
    assert scope["tokens"].shape == (1, 5)
    jax.tree.map(np.testing.assert_array_equal, scope["loaded"], scope["theirs"])


def test_the_page_on_variants_runs() -> None:
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        for code in blocks("python", (ROOT / "docs" / "variants.md").read_text()):
            exec(code, scope)
        assert scope["tokens"].shape == (1, 5)
        own, variables, x = scope["own"], scope["variables_of_own"], scope["x"]
        assert variables["params"]["value_norm"]["scale"].shape == (16,)
        cached = own.clone(decode=True)
        cache = cached.init(jax.random.key(0), x)["cache"]
        found, _ = cached.apply({**variables, "cache": cache}, x, mutable="cache")
        wanted = own.apply(variables, x, mask=masks.Causal())
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def size(module: Any, *given: Any) -> int:
    """How many numbers it learns."""
    found = jax.eval_shape(module.init, jax.random.key(0), *given)["params"]
    return sum(math.prod(x.shape) for x in jax.tree.leaves(found))


def test_the_page_on_models_has_their_sizes() -> None:
    """As their authors count them."""
    scope: dict = {}
    for code in blocks("python", (ROOT / "docs" / "models.md").read_text()):
        assert all(len(part.strip().splitlines()) <= 12 for part in code.split("\n\n"))
        exec(code, scope)
    tokens, image = np.zeros((1, 1), np.int32), np.zeros((1, 224, 224, 3), np.float32)
    table = (30522 + 512 + 2) * 768  # Of tokens, positions and segments.
    assert size(scope["bert"], np.zeros((1, 1, 768))) + table == 109_482_240 - 769 * 768
    assert size(scope["vit_base"], image) == 86_389_248 - 769 * 768  # Without what pools.
    assert size(scope["clip_image"], image) == 87_456_000
    assert size(scope["siglip_image"], image) == 92_884_224 - 7_087_104
    assert size(scope["dinov3"], image) == 85_660_416 - 768  # Without the token of what is hidden.
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
    x = np.zeros((1, 2, 2048))
    for name in ("qwen3_next", "olmo2"):
        assert size(scope[name], x) > 0


def test_ci_runs_the_command_of_the_readme() -> None:
    commands = [block.strip() for block in blocks("sh")]
    (tests,) = [command for command in commands if "pytest" in command]
    install_and_test = tests.split("activate && ")[1]
    assert install_and_test in (ROOT / ".ci/run").read_text().splitlines()


def test_the_tree_names_every_file() -> None:
    (tree,) = [block for block in blocks("") if "flax_mha/" in block]
    for folder in ("flax_mha", "experiments", "configs"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "__init__.py":
                assert re.search(rf"^ +{re.escape(path.name)} ", tree, re.MULTILINE), path
