"""Folders as published: bfloat16, in several files, with the ends of generation."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
pytest.importorskip("transformers", reason="needs the extra families")

from flax_mha import interop  # noqa: E402
from tests.interop.families import CASES, make  # noqa: E402
from tests.support.oracle import error  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
NAMES = ("olmo2", "mt5", "modernbert classifies", "dinov2, registers", "deepseek-v3", "gemma4")


@pytest.mark.parametrize("name", NAMES)
def test_sharded_bfloat16_folder_loads_and_is_saved(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs = make(case).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len([*(tmp_path / "theirs").glob("*.safetensors")]) > 1
    module, variables = interop.load(tmp_path / "theirs")
    assert {x.dtype for x in jax.tree.leaves(variables)} == {np.dtype("bfloat16")}

    _, wide = interop.load(tmp_path / "theirs", dtype="float32")
    given: Any = {key: torch.tensor(x) for key, x in case.given.items()}
    # Not theirs.float(): in bfloat16, frequencies of rotations were rounded too.
    exact = type(theirs).from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    with torch.no_grad():
        found = exact(**given)
    wanted = (found.logits if hasattr(found, "logits") else found.last_hidden_state).numpy()
    assert error(module.apply(wide, *case.ours), wanted) < 1e-5
    if "input_ids" in case.given and hasattr(theirs, "lm_head"):
        eos = case.config.eos_token_id
        assert interop.generation(tmp_path / "theirs")["eos"] == (eos,)

    interop.save(tmp_path / "theirs", variables, tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours")
    assert again.dtype == torch.bfloat16
    mine = again.state_dict()
    for key, x in theirs.state_dict().items():
        if not key.endswith("mask_token"):
            np.testing.assert_array_equal(mine[key].float(), x.float(), err_msg=key)
