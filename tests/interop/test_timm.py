"""Vision Transformers of timm: logits, features, and state dicts that convert back bitwise."""

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

SIZE: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5
}  # fmt: skip
IMAGES = np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)
OURS = IMAGES.transpose(0, 2, 3, 1)
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "registers and scales": {"reg_tokens": 2, "init_values": 0.1},
    "norm before": {"pre_norm": True, "act_layer": "quick_gelu", "qkv_bias": False},
    "features": {"num_classes": 0, "mlp_ratio": 2.5},
    "not square": {"patch_size": (4, 2), "img_size": (16, 8)},
}


@pytest.mark.parametrize("name", CASES)
def test_vit_matches_timm(name: str, tmp_path: Any) -> None:
    options = SIZE | CASES[name]
    theirs = seeded(lambda: timm.VisionTransformer(**options))
    config = {"model_type": "timm_vit", **options}
    family = interop.family(config)
    height, width = family.example[0].shape[1:3]
    with torch.no_grad():
        given = torch.tensor(IMAGES[..., :height, :width])
        want = (theirs if options["num_classes"] else theirs.forward_features)(given).numpy()
    variables = from_tensors(family, arrays(theirs))
    got = jax.jit(family.module.apply)(variables, OURS[:, :height, :width])
    assert error(got, want) < 2e-6
    actual = to_tensors(family, variables)
    assert actual.keys() == theirs.state_dict().keys()
    for key, x in arrays(theirs).items():
        np.testing.assert_array_equal(actual[key], x)
    interop.save(config, variables, tmp_path)
    _, loaded = interop.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded, variables)


def test_input_gradients_match_timm() -> None:
    theirs = seeded(lambda: timm.VisionTransformer(**SIZE))
    family = interop.family({"model_type": "timm_vit", **SIZE})
    images = torch.tensor(IMAGES, requires_grad=True)
    theirs(images).square().sum().backward()
    variables = from_tensors(family, arrays(theirs))
    got = jax.jit(jax.grad(lambda x: (family.module.apply(variables, x) ** 2).sum()))(OURS)
    assert error(got.transpose(0, 3, 1, 2), images.grad.numpy()) < 1e-5


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
    told = "activation" if name == "act_layer" else name
    with pytest.raises(ValueError, match=f"the config's {told} must be"):
        interop.family({"model_type": "timm_vit", **SIZE, name: value})


def test_wrong_tensors_raise() -> None:
    theirs = timm.VisionTransformer(**SIZE, qk_norm=True)
    tensors = {k: x for k, x in arrays(theirs).items() if k != "cls_token"}
    tensors["pos_embed"] = np.zeros((1, 3, 16), np.float32)
    told = "surplus blocks.0.attn.k_norm.weight.*missing cls_token; pos_embed must be"
    with pytest.raises(ValueError, match=told):
        from_tensors(interop.family({"model_type": "timm_vit", **SIZE}), tensors)
