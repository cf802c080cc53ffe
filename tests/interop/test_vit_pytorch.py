"""vit-pytorch's ViT: logits, features, gradients, and state dicts that convert back bitwise."""

from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
library = pytest.importorskip("vit_pytorch", reason="needs vit-pytorch")

from flax_mha import interop  # noqa: E402
from flax_mha.interop.table import from_tensors, to_tensors  # noqa: E402
from tests.interop.test_timm import IMAGES, OURS  # noqa: E402
from tests.interop.test_torch_layers import arrays, seeded  # noqa: E402
from tests.support.oracle import error  # noqa: E402

SIZE: dict[str, Any] = {
    "image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 2, "heads": 4,
    "mlp_dim": 24,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as it is": {}, "mean": {"pool": "mean"}, "features": {"num_classes": 0, "dim_head": 6},
    "one head": {"heads": 1, "dim_head": 16},
    "not square": {"patch_size": (4, 2), "image_size": (16, 8)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_vit_matches_vit_pytorch(name: str, tmp_path: Any) -> None:
    options = SIZE | CASES[name]
    theirs = seeded(lambda: library.ViT(**options))
    config = {"model_type": "vit_pytorch", **options}
    family = interop.family(config)
    height, width = family.example[0].shape[1:3]
    images = torch.tensor(IMAGES[..., :height, :width], requires_grad=True)
    want = theirs(images)
    want.square().sum().backward()
    variables = from_tensors(family, arrays(theirs))

    def loss(x: Any) -> Any:
        y = family.module.apply(variables, x)
        return (y**2).sum(), y

    gradient, got = jax.jit(jax.grad(loss, has_aux=True))(OURS[:, :height, :width])
    assert error(got, want.detach().numpy()) < 1e-5
    assert error(gradient.transpose(0, 3, 1, 2), images.grad.numpy()) < 1e-4
    actual = to_tensors(family, variables)
    for key, x in arrays(theirs).items():
        np.testing.assert_array_equal(actual.pop(key), x)
    assert not actual
    interop.save(config, variables, tmp_path)
    _, loaded = interop.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded, variables)


def test_unsupported_options_raise() -> None:
    with pytest.raises(ValueError, match="the config's pool"):
        interop.family({"model_type": "vit_pytorch", **SIZE, "pool": "max"})
