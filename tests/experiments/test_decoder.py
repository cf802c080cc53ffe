"""The text task as a decoder to grow: dtypes, loops, accumulated gradients and tokenizers."""

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import decoder_1b, pydoc_lm
from experiments import reports, tasks
from experiments.runs.failures import RunError
from experiments.tasks import text
from experiments.tasks.task import fingerprint
from experiments.tasks.tokenizer import Tokenizer
from experiments.trained import responses

ROOT = Path(__file__).parent.parent.parent
WRITTEN = "Être, ou ne pas être: that is the question. 日本語 \n" * 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a byte-level BPE of 280 tokens."""
    library: Any = pytest.importorskip("tokenizers")
    bpe, bytewise = library.Tokenizer(library.models.BPE()), library.pre_tokenizers.ByteLevel
    bpe.pre_tokenizer = bytewise(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=bytewise.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([WRITTEN], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe.save(str(path))
    return str(path)


@pytest.fixture
def config() -> ConfigDict:
    config = pydoc_lm.get_config()
    config.length, config.data.stride, config.batch_size = 16, 16, 4
    config.model.features, config.model.mlp_dim, config.model.num_layers = 16, 16, 2
    config.model.num_heads, config.model.num_kv_heads = 2, 1
    config.steps = 4
    return config


def changed(config: ConfigDict, **model: Any) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.model = ConfigDict({**config.model, **model})
    return config


def loss_and_gradient(config: ConfigDict, params: Any) -> Any:
    task = tasks.make(config)
    batch = next(iter(task.batches(0, 4, np.arange(4))))
    gradient = jax.jit(jax.value_and_grad(lambda p: task.loss(p, batch, jax.random.key(0))[0]))
    return gradient(params)


def stacked(params: Any) -> Any:
    """Return parameters for a scanned decoder."""
    decoder = params["decoder"]
    layers = [decoder[f"layers_{i}"] for i in range(2)]
    rest = {name: x for name, x in decoder.items() if not name.startswith("layers_")}
    joined = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    return {**params, "decoder": {**rest, "layers": joined}}


@pytest.mark.sampled(0, slow=0.16)
def test_scan_and_remat_change_no_loss_or_gradient(config: ConfigDict) -> None:
    params = jax.jit(tasks.make(config).init)(jax.random.key(0))
    loss, gradient = loss_and_gradient(config, params)
    for model in ({"remat": True}, {"scan": True}, {"scan": True, "remat": "z,lse"}):
        restack = stacked if "scan" in model else lambda tree: tree
        other = changed(config, **model)
        shapes = jax.eval_shape(tasks.make(other).init, jax.random.key(0))
        assert jax.tree.structure(shapes) == jax.tree.structure(restack(params))
        found, slope = loss_and_gradient(other, restack(params))
        np.testing.assert_allclose(found, loss, rtol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), slope, restack(gradient)
        )


@pytest.mark.slow
def test_bfloat16_computes_beside_float32_parameters(config: ConfigDict) -> None:
    params = jax.jit(tasks.make(config).init)(jax.random.key(0))
    loss, _ = loss_and_gradient(config, params)
    with jax.numpy_dtype_promotion("standard"):  # as for users: Flax's norms need it
        found, slope = loss_and_gradient(changed(config, dtype="bfloat16"), params)
    assert found.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(slope)} == {jnp.dtype(jnp.float32)}
    assert found != loss
    np.testing.assert_allclose(found, loss, rtol=0.02)


def test_tokens_become_the_text_again(tokenizer: str) -> None:
    for words in (Tokenizer(tokenizer), text.Bytes()):
        tokens = words.encode(WRITTEN.encode())
        assert tokens.max() < words.size
        for split in (1, 7):
            said = "".join(map(responses.stream(words, tokens[:split]), tokens[split:].tolist()))
            assert WRITTEN.endswith(said)
            assert split > 1 or said == WRITTEN
        batch = text.windows(tokens, 16, 5)
        np.testing.assert_array_equal(batch["tokens"][:, 1:][batch["weight"] > 0], tokens[1:])
    assert len(Tokenizer(tokenizer).encode(WRITTEN.encode())) < 0.75 * len(WRITTEN)


def test_ends_of_a_text_may_cut_a_character(tokenizer: str) -> None:
    words = Tokenizer(tokenizer)
    np.testing.assert_array_equal(words.encode("本, 日".encode()[1:-1]), words.encode(b", "))
    with pytest.raises(RunError, match=r"a tokenizer needs a text in UTF-8: .*; convert it"):
        words.encode(b"a\xffb")


@pytest.mark.parametrize(
    ("normalizer", "text", "told"),
    [
        ("Lowercase", "Être, ou", "got 'tre, ou' for 'Être, ou'"),
        ("", "a – b", "got 'a  b' for 'a – b'"),
    ],
)
def test_tokenizer_that_loses_text_is_refused(
    normalizer: str, text: str, told: str, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra families")
    letters = {c: i for i, c in enumerate("tre, ouab")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    made.decoder = tokenizers.decoders.Fuse()
    if normalizer:
        made.normalizer = getattr(tokenizers.normalizers, normalizer)()
    made.save(str(tmp_path / "tokenizer.json"))
    words = Tokenizer(str(tmp_path / "tokenizer.json"))
    assert words.encode(b"rute, ab").tolist()[1:] == [letters[c] for c in "rute, ab"]
    with pytest.raises(RunError, match=f"must give back the text that it encodes, {told}"):
        words.encode(text.encode())


@pytest.mark.sampled(0, slow=0.16)
def test_bits_per_byte_count_bytes_with_a_tokenizer(
    config: ConfigDict, tokenizer: str, tmp_path: Path
) -> None:
    """A uniform model takes log₂ 280 bits for each token."""
    config.data.tokenizer, config.data.path = tokenizer, str(tmp_path / "text")
    Path(config.data.path).write_text(WRITTEN)
    task: Any = tasks.make(config)
    assert task.model.embedding.vocab_size == 280
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums = [task.evaluate(params, batch) for batch in task.test_batches()]
    count, bits = (sum(float(x[name]) for x in sums) for name in ("count", "bits_per_byte"))
    assert count == len(task.held) - 1
    expected = math.log2(280) * count / len(task.test)
    assert bits / count == pytest.approx(expected, rel=1e-5)
    batch = next(iter(task.batches(0, 4, np.arange(4))))
    _, metrics = task.loss(params, batch, jax.random.key(0))
    per_byte = (len(task.tokens) - 1) / len(task.train)
    assert metrics["bits_per_byte"] == pytest.approx(math.log2(280) * per_byte, rel=1e-5)
    reports.make(task).draw(params, tmp_path)
    assert (tmp_path / "context.png").exists()
    # Another tokenizer is other data.
    config.data.tokenizer = ""
    assert fingerprint(tasks.make(config)) != fingerprint(task)


def test_wrong_tokenizers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    for content in ("", "{}", "[1"):
        path.write_text(content)
        with pytest.raises(RunError, match=r"must be a tokenizer.json, got: "):
            Tokenizer(str(path))
    with pytest.raises(RunError, match=r"json must be a file, got .*none: No such file"):
        Tokenizer(str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RunError, match="needs the package tokenizers; pip install tokenizers"):
        Tokenizer(str(path))


@pytest.mark.sampled(0, slow=0.16)
def test_run_with_a_tokenizer_resumes_and_generates(tokenizer: str, tmp_path: Path) -> None:
    data, run = tmp_path / "text", tmp_path / "run"
    data.write_text(WRITTEN)

    def said(program: str, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", f"experiments.{program}", *words], cwd=ROOT,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    small = {
        "length": 16, "batch_size": 8, "steps": 200, "evaluate_every": 200, "data.stride": 8,
        "checkpoint_every": 100, "data.path": data, "data.tokenizer": tokenizer,
        "model.features": 32, "model.mlp_dim": 64, "model.num_layers": 2, "model.scan": True,
        "model.remat": True, "optimizer.accumulate": 2, "optimizer.learning_rate": 0.02,
        "mesh.data": 1,
    }  # fmt: skip
    words = ["--config=configs/pydoc_lm.py", f"--workdir={run}"]
    words += [f"--config.{key}={value}" for key, value in small.items()]
    assert "bits per byte" in said("train", *words)
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    assert newest.name == "200"
    shutil.rmtree(newest)
    assert "100 steps on" in said("train", *words)
    moved = data.rename(tmp_path / "moved")
    words = [f"--workdir={run}", "--prompt=Être, ou ne pas", f"--data={moved}"]
    assert said("generate", *words).startswith(" être: that is")  # as far as 16 tokens reach


def test_decoder_config_has_its_stated_sizes() -> None:
    config = decoder_1b.get_config()
    for model, size in (
        ({}, 973_670_400),
        ({"features": 4096, "num_layers": 32, "mlp_dim": 14336, "tied": False}, 6_981_685_248),
        ({"features": 128, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "mlp_dim": 384},
         787_584),
    ):  # fmt: skip
        decoder = text.language_model(changed(config, **model).model, 256)
        with jax.numpy_dtype_promotion("standard"):  # as for users: Flax's norms need it
            shapes = jax.eval_shape(decoder.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        assert sum(x.size for x in jax.tree.leaves(shapes)) == size
