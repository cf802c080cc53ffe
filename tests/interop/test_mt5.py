"""mT5 with a head of its own, as published; `transformers` states that it is tied."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
hf = pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import generate, interop  # noqa: E402
from tests.interop.families import CASES, IDS, T5, make  # noqa: E402
from tests.support.oracle import error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
# The cache of `transformers` has room for as many layers as the encoder has.
CASE = CASES["mt5"]._replace(config=hf.MT5Config(**T5 | {"num_decoder_layers": 2}))


@pytest.mark.slow
def test_untied_head_loads_generates_and_is_saved(tmp_path: Path) -> None:
    theirs = make(CASE)
    table = theirs.lm_head.weight
    theirs.lm_head.weight = torch.nn.Parameter(table.flip(0).clone())
    given = {name: torch.tensor(x) for name, x in CASE.given.items()}
    with torch.no_grad():
        logits = theirs(**given).logits.numpy()
    tokens = theirs.generate(torch.tensor(IDS), max_new_tokens=8, do_sample=False,
                             eos_token_id=None)  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    config = json.loads(file.read_text())
    with pytest.raises(ValueError, match=r"lm_head.weight must equal shared.weight, which the co"):
        interop.load(tmp_path / "theirs")
    file.write_text(json.dumps(config | {"tie_word_embeddings": False}))

    module, variables = interop.load(tmp_path / "theirs")
    assert error(module.apply(variables, *CASE.ours), logits) < 1e-5
    start = interop.generation(tmp_path / "theirs")["start"]
    ours = generate(module, variables, IDS, start=start, max_new_tokens=8)
    np.testing.assert_array_equal(ours.tokens, tokens[:, 1:].numpy())

    interop.save(tmp_path / "theirs", variables, tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours")
    for name, x in theirs.named_parameters():
        np.testing.assert_array_equal(again.get_parameter(name).detach(), x.detach())
