"""The mesh of a run."""

import pytest
from ml_collections import ConfigDict

from experiments.trainer import mesh


@pytest.mark.parametrize(
    ("kv_heads", "model", "axes"),
    [
        (4, 1, {"context": 2, "ulysses": 4}), (2, 1, {"context": 4, "ulysses": 2}),
        (4, 2, {"context": 2, "ulysses": 2}), (2, 2, {"context": 4}), (4, 4, {"context": 2}),
    ],
)  # fmt: skip
def test_context_axis_is_split_by_the_heads(
    config: ConfigDict, kv_heads: int, model: int, axes: dict[str, int]
) -> None:
    """If they divide over some of its devices."""
    config.model.num_kv_heads = kv_heads
    config.mesh.model, config.mesh.context = model, 8 // model
    built = mesh.make_mesh(config)
    assert built.shape == {"data": 1, "fsdp": 1, "model": model, **axes}
    along = ("context", "ulysses") if "ulysses" in axes else "context"
    assert ("length", along) in mesh.rules(built)
