"""The text task as a decoder to grow: dtypes and tokenizers."""

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import reports, tasks
from experiments.common.failures import RunError
from experiments.tasks import text
from experiments.tasks.task import fingerprint
from experiments.tasks.tokenizer import Tokenizer
from experiments.trained import responses
from tests.experiments.launch import call

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


def zeros(task: Any) -> Any:
    """Return the parameters of a uniform model."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


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
    words = Tokenizer(tokenizer)
    assert len(words.encode(WRITTEN.encode())) < 0.75 * len(WRITTEN)
    # The ends of a text may cut a character.
    np.testing.assert_array_equal(words.encode("本, 日".encode()[1:-1]), words.encode(b", "))


@pytest.mark.sampled(0)
def test_uniform_model_has_the_bits_of_its_vocabulary(
    text_config: ConfigDict, tokenizer: str, tmp_path: Path
) -> None:
    """For each token log₂ 280 bits, and without a tokenizer 8 for each byte."""
    text_config.data.tokenizer, text_config.data.path = tokenizer, str(tmp_path / "text")
    Path(text_config.data.path).write_text(WRITTEN)
    task: Any = tasks.make(text_config)
    assert task.model.embedding.vocab_size == 280
    params = zeros(task)
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
    text_config.data.tokenizer = ""
    other: Any = tasks.make(text_config)
    assert fingerprint(other) != fingerprint(task)
    found = jax.jit(other.evaluate)(zeros(other), other.test_batches()[0])
    assert found["bits_per_byte"] / found["count"] == pytest.approx(8, rel=1e-5)


@pytest.mark.sampled(0)
def test_run_with_a_tokenizer_resumes_and_generates(tokenizer: str, tmp_path: Path) -> None:
    data, run = tmp_path / "text", tmp_path / "run"
    data.write_text(WRITTEN)

    def said(*words: str) -> str:
        done = call(*words)
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
    words += ["--temperature=9", "--max_new_tokens=6"]
    drawn = [said("generate", *words, f"--seed={seed}") for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_tokenizers_that_cannot_serve_are_refused(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=r"a tokenizer needs a text in UTF-8: .*; convert it"):
        Tokenizer(tokenizer).encode(b"a\xffb")
    with pytest.raises(RunError, match=r"json must be a file, got .*none: No such file"):
        Tokenizer(str(tmp_path / "none"))
    import tokenizers

    letters = {c: i for i, c in enumerate("tre, ouab")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    words = Tokenizer(str(tmp_path / "tokenizer.json"))
    assert words.encode(b"rute, ab").tolist()[1:] == [letters[c] for c in "rute, ab"]
    told = "must give back the text that it encodes, got 'a  b' for 'a – b'"
    with pytest.raises(RunError, match=told):
        words.encode("a – b".encode())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RunError, match="needs the package tokenizers; pip install tokenizers"):
        Tokenizer(tokenizer)
