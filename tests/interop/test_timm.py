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
    "timm, registers and scales": TIMM | {"reg_tokens": 2, "init_values": 0.1},
    "timm, norm before": TIMM | {"pre_norm": True, "act_layer": "quick_gelu", "qkv_bias": False},
    "timm, features": TIMM | {"num_classes": 0, "mlp_ratio": 2.5},
    "timm, not square": TIMM | {"patch_size": (4, 2), "img_size": (16, 8)},
    "vit-pytorch": VIT_PYTORCH,
    "vit-pytorch, mean": VIT_PYTORCH | {"pool": "mean"},
    "vit-pytorch, features": VIT_PYTORCH | {"num_classes": 0, "dim_head": 6},
    "vit-pytorch, one head": VIT_PYTORCH | {"heads": 1, "dim_head": 16},
    "vit-pytorch, not square": VIT_PYTORCH | {"patch_size": (4, 2), "image_size": (16, 8)},
}


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
    ("name", "value"),
    [
        ("global_pool", "avg"), ("qk_norm", True), ("scale_attn_norm", True),
        ("scale_mlp_norm", True), ("proj_bias", False), ("class_token", False),
        ("pos_embed", "none"), ("no_embed_class", True), ("final_norm", False), ("fc_norm", True),
        ("norm_layer", "rmsnorm"), ("embed_norm_layer", "layernorm"),
        ("attn_layer", "diff"), ("block_fn", "parallel"), ("mlp_layer", "glu"),
        ("embed_layer", "hybrid"), ("act_layer", "mish"),
    ],
)  # fmt: skip
def test_unsupported_options_raise(name: str, value: Any) -> None:
    told = "hidden_act" if name == "act_layer" else name
    with pytest.raises(ValueError, match=f"{told}(=| must be)"):
        interop.family(TIMM | {name: value})


def test_wrong_tensors_raise() -> None:
    options = {key: x for key, x in TIMM.items() if key != "model_type"}
    theirs = timm.VisionTransformer(**options, qk_norm=True)
    tensors = {k: x for k, x in arrays(theirs).items() if k != "cls_token"}
    tensors["pos_embed"] = np.zeros((1, 3, 16), np.float32)
    told = "surplus blocks.0.attn.k_norm.weight.*pos_embed must be .*missing cls_token"
    with pytest.raises(ValueError, match=told):
        from_tensors(interop.family(TIMM), tensors)


def test_unsupported_pools_raise() -> None:
    with pytest.raises(ValueError, match="the config's pool"):
        interop.family(VIT_PYTORCH | {"pool": "max"})
