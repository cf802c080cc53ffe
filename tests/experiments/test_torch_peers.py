"""PyTorch beside other libraries computes the same results, if installed."""

import numpy as np
import pytest

from experiments.measure.peers import decoding, torch_peers
from experiments.measure.peers.cases import Case

torch = pytest.importorskip("torch")


def test_torch_decoding_attends_to_the_cache() -> None:
    """From an empty cache: with no earlier token, every output is the token's own value."""
    size = decoding.Size(2, 64, 2, 8, "float32")
    work = torch_peers.decoding(size, 0)
    first = work.outcome(work.call()).out
    # The same token again: attention to two equal keys gives the same output.
    np.testing.assert_allclose(work.outcome(work.call()).out, first, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "documents"), [(0, 0), (9, 0), (0, 3), (9, 3)])
def test_flex_attention_mask_matches_the_others(causal: bool, window: int, documents: int) -> None:
    case = Case("core", False, causal, 1, 40, window=window, documents=documents)
    rule, table = torch_peers._rule(case, torch, "cpu"), torch_peers._mask(case, torch, "cpu")
    if table is None:
        table = torch.ones(40, 40, dtype=torch.bool)
        table = table.tril() if causal else table
    index = torch.arange(40)
    seen = torch.ones_like(table) if rule is None else rule(0, 0, index[:, None], index[None])
    assert (seen == table).all()
