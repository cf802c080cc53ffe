"""Vision Transformers of timm and vit-pytorch: outputs, gradients, and state dicts both ways."""

from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra families")
timm = pytest.importorskip("timm.models.vision_transformer", reason="needs timm")

from flax_mha import interop  # noqa: E402
from flax_mha.interop.table import from_tensors, to_tensors  # noqa: E402
from tests.interop.test_torch_layers import arrays, seeded  # noqa: E402
from tests.support.oracle import error  # noqa: E402

IMAGES = np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)
TIMM: dict[str, Any] = {
    "model_type": "timm_vit", "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2,
    "num_heads": 4, "num_classes": 5,
}  # fmt: skip
VIT_PYTORCH: dict[str, Any] = {
    "model_type": "vit_pytorch", "image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16,
    "depth": 2, "heads": 4, "mlp_dim": 24,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "timm": TIMM,
    "timm, registers and scales": TIMM | {
        "reg_tokens": 2, "init_values": 0.1, "pre_norm": True, "act_layer": "quick_gelu",
        "qkv_bias": False,
    },
    "timm, features": TIMM | {"num_classes": 0, "mlp_ratio": 2.5},
    "timm, not square": TIMM | {"patch_size": (4, 2), "img_size": (16, 8)},
    "vit-pytorch": VIT_PYTORCH,
    "vit-pytorch, features": VIT_PYTORCH | {"num_classes": 0, "dim_head": 6, "pool": "mean"},
    "vit-pytorch, one head": VIT_PYTORCH | {"heads": 1, "dim_head": 16},
    "vit-pytorch, not square": VIT_PYTORCH | {"patch_size": (4, 2), "image_size": (16, 8)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_vit_matches_library(name: str, tmp_path: Any) -> None:
    options = {key: x for key, x in CASES[name].items() if key != "model_type"}
    is_timm = "timm" in name
    library = timm.VisionTransformer if is_timm else pytest.importorskip("vit_pytorch").ViT
    theirs = seeded(lambda: library(**options))
    family = interop.family(CASES[name])
    height, width = family.example[0].shape[1:3]
    images = torch.tensor(IMAGES[..., :height, :width], requires_grad=True)
    run = theirs.forward_features if is_timm and not options["num_classes"] else theirs
    want = run(images)
    want.square().sum().backward()
    variables = from_tensors(family, arrays(theirs))

    def loss(x: Any) -> Any:
        y = family.module.apply(variables, x)
        return (y**2).sum(), y

    x = images.detach().numpy().transpose(0, 2, 3, 1)
    gradient, got = jax.jit(jax.grad(loss, has_aux=True))(x)
    assert error(got, want.detach().numpy()) < 1e-5
    assert error(gradient.transpose(0, 3, 1, 2), images.grad.numpy()) < 1e-4
    actual = to_tensors(family, variables)
    # vit-pytorch has an empty tensor in place of a class token.
    assert actual.keys() == {key for key, x in theirs.state_dict().items() if x.numel()}
    for key in actual:
        x = arrays(theirs)[key]
        np.testing.assert_array_equal(actual[key], x)
    interop.save(CASES[name], variables, tmp_path)
    _, loaded = interop.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded, variables)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (TIMM | {"global_pool": "avg"}, "global_pool"),
        (TIMM | {"qk_norm": True}, "qk_norm"),
        (TIMM | {"class_token": False}, "class_token"),
        (TIMM | {"norm_layer": "rmsnorm"}, "norm_layer"),
        (TIMM | {"block_fn": "parallel"}, "block_fn"),
        (TIMM | {"act_layer": "mish"}, "hidden_act must be"),
        (VIT_PYTORCH | {"pool": "max"}, "the config's pool"),
    ],
)
def test_unsupported_options_raise(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        interop.family(config)
