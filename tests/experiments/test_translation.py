"""Dates, user-defined pairs, and a trained run that answers."""

import datetime
from pathlib import Path

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import dates as dates_config
from experiments import generate, reports
from experiments.common.failures import RunError
from experiments.tasks import dates, translation
from experiments.trainer import loop
from tests.experiments.launch import begin


def test_test_dates_are_not_in_training() -> None:
    split = dates.load()
    held = {target for _, target in [*split.test, *split.unseen]}
    rng = np.random.default_rng(1)
    assert not held & {split.train[int(i)][1] for i in rng.integers(0, len(split.train), 500)}
    assert not held & {target for _, target in split.sample}
    days = {date for each in split.train._dates for date in each.tolist()}
    assert not days & {datetime.date.fromisoformat(target).toordinal() for target in held}
    assert len(days) == 200 * 365 + 49 - dates.HELD_OUT_DATES
    assert dates.UNSEEN not in split.train.styles
    assert all(dates.UNSEEN.write(datetime.date.fromisoformat(b)) == a for a, b in split.unseen)


def test_every_written_date_has_one_meaning() -> None:
    """In all styles together, for the days of several years."""
    meaning: dict[str, str] = {}
    days = [datetime.date(2001, 1, 1) + datetime.timedelta(i) for i in range(366)]
    days += [datetime.date(y, m, d) for y in (1969, 1970, 2012, 2068) for m in (1, 2, 12)
             for d in (1, 2, 12, 20)]  # fmt: skip
    written = dates.Written(np.array(sorted({day.toordinal() for day in days})), dates.STYLES)
    for i in range(len(written)):
        source, target = written[i]
        assert meaning.setdefault(source, target) == target
    assert dates.Style("de", "short").write(datetime.date(1969, 12, 31)) == "31.12.69"


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8"), max_size=12))
def test_vocabulary_decodes_what_it_encodes(string: str) -> None:
    vocabulary = translation.Vocabulary([string, "0123"])
    assert len(vocabulary) % 8 == 0
    tokens = vocabulary.encode(string, 14)
    assert tokens.shape == (14,)
    assert tokens.max() < len(vocabulary)
    assert vocabulary.decode(tokens) == string
    assert translation.Vocabulary(["0123"]).decode(tokens * 0 + translation.UNKNOWN) == 14 * "�"


def test_pairs_of_a_user_file(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{i}\t{-i}\n" for i in range(25)) + "3\t-3\n")
    split = translation.read(str(path))
    assert split.test == [("0", "0"), ("10", "-10"), ("20", "-20")]
    assert (len(split.train), len(set(split.train) & set(split.test))) == (22, 0)
    for content, message in (
        ("one\n", r"a source, a tab and a target, got 'one' in line 1"),
        ("a\tb\n", "at least 10 different pairs, got 1"),
    ):
        path.write_text(content)
        with pytest.raises(RunError, match=message):
            translation.read(str(path))
    with pytest.raises(RunError, match=r"must be a file, got .*none"):
        translation.read(str(tmp_path / "none"))


@pytest.mark.sampled(0)
def test_translator_trains_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dates_config.get_config()
    config.model.features, config.model.mlp_dim = 16, 16
    config.model.encoder_layers = config.model.decoder_layers = 1
    config.data.path = str(tmp_path / "pairs.tsv")
    Path(config.data.path).write_text("".join(f"{i} two\t{i}\n" for i in range(40)))
    config.steps, config.batch_size, config.mesh.data = 2, 4, 1
    config.log_every, config.evaluate_every, config.checkpoint_every = 1, 2, 2
    task = begin(tmp_path / "run", config)
    with pytest.raises(RunError, match="has no checkpoint yet; train it first"):
        generate.speak(tmp_path / "run", "1 two", config.data.path)
    result = loop.train(loop.build(config, task), tmp_path / "run")
    assert 0 <= result.metrics["exact"] <= 1
    params = result.state.params

    # Greedy decoding with a cache gives the most likely next token after each prefix.
    batch = task.arrays(task.split.test)
    found = np.asarray(task.translate(params, batch["source"], batch["length"]).tokens)
    logits = np.asarray(task.logits(params, {**batch, "target": jnp.asarray(found)}))
    ended = np.cumsum(found == translation.END, axis=1) - (found == translation.END) > 0
    np.testing.assert_array_equal(np.where(ended, translation.END, logits.argmax(-1)), found)

    reports.make(task).draw(params, tmp_path)
    assert matplotlib.image.imread(tmp_path / "alignment.png").std() > 0.05
    assert reports.make(task).headline(result.metrics).startswith("exact match: ")

    prompt = task.split.test[1][0]
    wanted = task.vocabulary.decode(found[1])
    generate.speak(tmp_path / "run", prompt, config.data.path, beams=2)
    capsys.readouterr()
    generate.speak(tmp_path / "run", prompt, config.data.path)
    assert capsys.readouterr().out == wanted + "\n"
    with pytest.raises(RunError, match=r"must have 1 to 6 characters.*got 7"):
        generate.speak(tmp_path / "run", "1234567", config.data.path)
    Path(config.data.path).write_text("".join(f"{i} ten\t{i}\n" for i in range(40)))
    with pytest.raises(RunError, match=r"the data of .* have the SHA-256"):
        generate.speak(tmp_path / "run", prompt, config.data.path)
