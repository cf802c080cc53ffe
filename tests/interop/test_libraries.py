"""Attention layers of other libraries: the same numbers, and arrays that convert back bitwise."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import MultiHeadAttention, interop, masks, positions
from tests.interop.libraries import (
    D,
    N,
    Theirs,
    V,
    X,
    d2l,
    equinox,
    flax,
    gemma,
    haiku,
    kauldron,
    keras,
    maxtext,
    mlx,
    timm,
    vit_pytorch,
    whole_vit_pytorch,
    x_transformers,
)
from tests.support.arrays import random_variables
from tests.support.oracle import error

# The library up to the comma.
CASES: dict[str, Callable[[], Theirs]] = {
    "d2l": d2l,
    "timm": timm,
    "timm, sizes and biases": lambda: timm(qkv_bias=True, attn_head_dim=6, dim_out=9),
    "vit-pytorch": vit_pytorch,
    "vit-pytorch, one head": lambda: vit_pytorch(1, D),
    "x-transformers": lambda: x_transformers(dim_head=6),
    "x-transformers, shared keys": lambda: x_transformers(
        dim_head=6, value_dim_head=5, kv_heads=1
    ),
    "x-transformers, sizes": lambda: x_transformers(
        (X, V, V), dim_head=6, value_dim_head=5, dim_context=20, dim_out=9
    ),
    "equinox": equinox,
    "equinox, sizes": lambda: equinox(
        qk_size=6, vo_size=5, use_query_bias=True, use_output_bias=True
    ),
    "haiku": haiku,
    "haiku, sizes": lambda: haiku(value_size=5, model_size=9, with_bias=False),
    "keras": keras,
    "keras, sizes": lambda: keras(value_dim=5, output_shape=9, use_bias=False),
    "keras, grouped": lambda: keras(
        "GroupQueryAttention", head_dim=6, num_query_heads=N, num_key_value_heads=2
    ),
    "mlx": mlx,
    "mlx, sizes": lambda: mlx(
        key_input_dims=12, value_input_dims=20, value_dims=24, value_output_dims=9, bias=True
    ),
    "gemma-qkv": gemma,
    "gemma, grouped": lambda: gemma(
        2, use_qk_norm=True, rope_base_frequency=1_000_000, attn_logits_soft_cap=5.0
    ),
    "kauldron": lambda: kauldron(v_features=20, normalize_qk=True),
    "flax": lambda: flax(normalize_qk=True),
    "maxtext": maxtext,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_layer_matches_library(name: str) -> None:
    library, theirs = name.partition(",")[0], CASES[name]()
    want = np.asarray(theirs.run(theirs.arrays, *theirs.given))
    # Only libraries with the same names must be named.
    named = library if library in ("flax", "kauldron", "maxtext") else None
    count = 1 if "one" in name else N
    module, variables = interop.from_layer(theirs.arrays, count, named, **theirs.fields)
    assert error(jax.jit(module.apply)(variables, *theirs.given), want) < 2e-6
    back = interop.to_layer(module, variables, library, theirs.prefix)
    assert back.keys() == theirs.arrays.keys()
    for key, x in theirs.arrays.items():
        np.testing.assert_array_equal(back[key], x)
    # The library accepts the converted arrays.
    np.testing.assert_array_equal(theirs.run(back, *theirs.given), want)


REFUSED_BY_NAME: dict[str, Callable[[], Theirs]] = {
    "to_k.weight must be": lambda: x_transformers(dim_head=6, kv_heads=2),
    "surplus mem_k": lambda: x_transformers(num_mem_kv=1),
    "surplus own/gate/bias": lambda: keras(use_gate=True),
    "surplus cls_token; surplus mlp_head.bias": whole_vit_pytorch,
}


@pytest.mark.parametrize("told", REFUSED_BY_NAME)
def test_unsupported_library_arrays_raise(told: str) -> None:
    with pytest.raises(ValueError, match=told):
        interop.from_layer(REFUSED_BY_NAME[told]().arrays, N)


@pytest.mark.parametrize(("library", "separator"), [("haiku", "/"), ("mlx", "."), ("equinox", ".")])
def test_nested_arrays_are_accepted(library: str, separator: str) -> None:
    arrays, nested = made(library), dict[str, dict[str, Any]]()
    for name, x in arrays.items():
        path, _, leaf = name.rpartition(separator)
        nested.setdefault(path, {})[leaf] = x
    flat, found = (interop.from_layer(x, N)[1] for x in (arrays, nested))
    jax.tree.map(np.testing.assert_array_equal, found, flat)


@pytest.mark.parametrize("name", ["keras-h5", "keras-h5-grouped"])
def test_names_in_keras_files_are_known(name: str, tmp_path: Path) -> None:
    CASES["keras"]()  # Sets Keras' backend, or skips.
    h5py, keras = pytest.importorskip("h5py"), pytest.importorskip("keras")
    x, is_grouped = keras.Input((5, D)), name == "keras-h5-grouped"
    kinds = keras.layers
    layer = kinds.GroupQueryAttention(6, N, 2) if is_grouped else kinds.MultiHeadAttention(N, 6)
    model = keras.Model(x, layer(x, x))
    model.save_weights(tmp_path / "a.weights.h5")
    arrays: dict[str, Any] = {}
    with h5py.File(tmp_path / "a.weights.h5") as file:
        file.visititems(lambda key, x: arrays.update({key: x[()]} if hasattr(x, "dtype") else {}))
    module, variables = interop.from_layer(arrays, N)
    by_path = interop.from_layer({w.path: w.numpy() for w in layer.weights}, N)
    assert module == by_path[0]
    jax.tree.map(np.testing.assert_array_equal, variables, by_path[1])
    start = f"layers/{layer.name}/"
    assert interop.to_layer(module, variables, name, start).keys() == arrays.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["a.weights.h5", "a.keras"])
def test_keras_files_are_read(name: str, dtype: str, tmp_path: Path) -> None:
    CASES["keras"]()  # Sets Keras' backend, or skips.
    pytest.importorskip("h5py")
    keras = pytest.importorskip("keras")
    x, kinds = keras.Input((5, D)), keras.layers
    plain = kinds.MultiHeadAttention(N, 6, dtype=dtype)
    grouped = kinds.GroupQueryAttention(6, N, 2, dtype=dtype)
    model = keras.Model(x, grouped(plain(x, x), x))
    (model.save if name == "a.keras" else model.save_weights)(tmp_path / name)
    with pytest.raises(ValueError, match=r"got 2; choose one by prefix=, of \['layers/grouped_"):
        interop.from_layer(tmp_path / name, N)
    for layer, kind in ((plain, "multi_head_attention"), (grouped, "grouped_query_attention")):
        found = interop.from_layer(tmp_path / name, N, prefix=f"layers/{kind}/")
        arrays = {w.path: np.asarray(w.value) for w in layer.weights}
        module, variables = interop.from_layer(arrays, N)
        assert found[0] == module
        assert variables["params"]["query"]["kernel"].dtype == dtype
        jax.tree.map(np.testing.assert_array_equal, found[1], variables)


def test_states_that_orbax_restored_lose_their_last_level(tmp_path: Path) -> None:
    module, variables = layer(True)
    own = flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(0))
    nnx.update(own, variables["params"])
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "state", nnx.state(own))
    checkpointer.wait_until_finished()
    restored = {"params": checkpointer.restore(tmp_path / "state")}
    assert "value" in restored["params"]["query"]["kernel"]
    for convert in (interop.to_torch, lambda *given: interop.to_layer(*given, "keras")):
        found, want = convert(module, restored), convert(module, variables)
        jax.tree.map(np.testing.assert_array_equal, found, want)
    model = {"layers": {0: nnx.to_pure_dict(nnx.state(own))}}
    for form, prefix in ((nnx.state(own), ""), (restored["params"], ""), (model, "layers/0/")):
        same = interop.from_layer(form, N, "flax", prefix=prefix)[1]
        jax.tree.map(np.testing.assert_array_equal, same, variables)


@pytest.mark.parametrize("window", [4, 5])
def test_windows_of_embedding_gemma_match(window: int) -> None:
    """`transformers` has its weights as Gemma's einsums, each with another order of axes."""
    torch = pytest.importorskip("torch", reason="needs the extra families")
    transformers = pytest.importorskip("transformers", reason="needs the extra families")
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=10, hidden_size=D, num_hidden_layers=1, num_attention_heads=N, head_dim=6,
        num_key_value_heads=2, intermediate_size=8, layer_types=["sliding_attention"],
        sliding_window=window, use_bidirectional_attention=True, query_pre_attn_scalar=9,
    )  # fmt: skip
    model = transformers.Gemma3TextModel(config).eval()
    layer, seen = model.layers[0].self_attn, dict[str, Any]()

    def keep(_: Any, __: Any, options: Any, out: Any) -> None:
        seen.update(options, out=out[0])

    layer.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        for x in layer.parameters():
            x.normal_(0, 0.3)
        model(torch.arange(9)[None])
    p = {name: x.detach().numpy() for name, x in layer.named_parameters()}
    q, k, v = (p[f"{x}_proj.weight"].reshape(-1, 6, D).swapaxes(1, 2) for x in "qkv")
    arrays = {
        "q_einsum": {"w": q}, "kv_einsum": {"w": np.stack([k, v])},
        "attn_vec_einsum": {"w": p["o_proj.weight"].T.reshape(N, 6, D)},
        "_query_norm": {"scale": p["q_norm.weight"]}, "_key_norm": {"scale": p["k_norm.weight"]},
    }  # fmt: skip
    mask = masks.Window(window // 2, window // 2)
    module, variables = interop.from_layer(arrays, N, scale=9**-0.5, mask=mask)
    x = seen["hidden_states"].numpy()
    assert error(jax.jit(module.apply)(variables, x), seen["out"].numpy()) < 2e-6


def test_equinox_mask_convention_matches() -> None:
    """True means visible, as in Equinox."""
    theirs = equinox()
    want = theirs.run(theirs.arrays, X, X, X, np.broadcast_to(np.tri(5, dtype=bool), (2, 5, 5)))
    module, variables = interop.from_layer(theirs.arrays, N)
    assert error(module.apply(variables, X, mask=masks.Causal()), want) < 2e-6


@pytest.mark.parametrize("library", interop.LIBRARIES)
def test_library_arrays_convert_back(library: str) -> None:
    """It needs no library."""
    biased: dict[str, Any] = dict.fromkeys(("x-transformers", "gemma", "gemma-qkv"), False)
    biased |= {"vit-pytorch": ("out",)}
    scale = 1.0 if library == "maxtext" else None
    module: Any = MultiHeadAttention(N, use_bias=biased.get(library, True), scale=scale)
    if library == "vit-pytorch":
        module = nn.Sequential([nn.LayerNorm(1e-5, use_fast_variance=False), module])
    variables = random_variables(module, X)
    tensors = interop.to_layer(module, variables, library, "a.b/")
    found = interop.from_layer(tensors, N, library)[1]
    jax.tree.map(np.testing.assert_array_equal, found, variables)


@functools.cache
def layer(use_bias: bool) -> tuple[MultiHeadAttention, Any]:
    """Return a layer and its variables."""
    module = MultiHeadAttention(N, use_bias=use_bias)
    return module, random_variables(module, X)


def made(library: str, **changed: Any) -> dict[str, Any]:
    """Return a layer's arrays in a library's form, some changed, None removed."""
    module, variables = layer(library not in ("x-transformers", "gemma"))
    scale = 1.0 if library == "maxtext" else None
    tensors = interop.to_layer(module.clone(scale=scale), variables, library) | changed
    return {name: x for name, x in tensors.items() if x is not None}


def changed(change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return Keras' arrays, changed."""
    return {name: change(x) for name, x in made("keras").items()}


FLAX = made("flax")
ONE = np.ones((1, D), np.float32)
MISTAKES: dict[str, tuple[Any, ...]] = {
    "missing W_k.weight": (made("d2l", **{"W_k.weight": None}), N),
    r"key_proj.weight must be \[16, 16\], is \[1, 16\]":
        (made("equinox", **{"key_proj.weight": ONE}), N),
    "surplus to_q.bias": (made("x-transformers", **{"to_q.bias": ONE[0]}), N),
    r"query/kernel must be \[16, 8, 2\], is \[16, 4, 4\]": (made("keras"), 8),
    "got .*weight.*from_torch": ({"weight": ONE}, N),
    "num_heads must be at least 1": (made("d2l"), 0),
    "must be .15, 16., is .16, 16.": (made("d2l"), 3),
    "query/kernel must have a floating dtype, is int8;.* multiply codes by their scales":
        (changed(np.int8), N),
    "query/kernel must have a floating dtype, is .V2;.* as ml_dtypes.bfloat16":
        (changed(lambda x: x.astype(jnp.bfloat16).view("V2")), N),
    "library must be given, .* Flax's layer need no conversion": (FLAX, N),
    r"query/kernel must be \[D, N, H\], got \[16, 16\]; .* T5X's matrices":
        ({name: x.reshape(D, -1) for name, x in FLAX.items() if "kernel" in name}, N),
    "library must be one of .*'timm'.*, got 'torch'": (FLAX, N, "torch"),
    r"of one attention layer of \['timm'\], got": (FLAX, N, "timm"),
    r"got 2; choose one by prefix=, of \['a/', 'b/'\]":
        ({f"{start}/{name}": x for start in "ab" for name, x in made("keras").items()}, N),
}  # fmt: skip


@pytest.mark.parametrize("told", MISTAKES)
def test_wrong_arrays_raise(told: str) -> None:
    with pytest.raises(ValueError, match=told):
        interop.from_layer(*MISTAKES[told])


def test_fields_are_of_the_layer_and_need_no_tensors() -> None:
    rotary = positions.Rotary(1e6)
    module, _ = interop.from_layer(made("gemma"), N, rotary=rotary, scale=0.5, mask=masks.Causal())
    assert (module.rotary, module.scale, module.mask) == (rotary, 0.5, masks.Causal())
    module, _ = interop.from_layer(made("maxtext"), N, "maxtext")
    assert (module.rotary, module.scale) == (None, 1.0)
    with pytest.raises(ValueError, match=r"not fit .*: no tensor for sinks"):
        interop.from_layer(made("keras"), N, sinks=True)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'head_dim'"):
        interop.from_layer(made("keras"), N, head_dim=4)


LAYER = MultiHeadAttention(N)
REFUSED: dict[str, tuple[Any, str]] = {
    "keras has no MultiHeadAttention with rotary":
        (MultiHeadAttention(N, rotary=positions.Rotary()), "keras"),
    "sizes and biases that equinox supports, .*key_proj":
        (MultiHeadAttention(N, num_kv_heads=2), "equinox"),
    "sizes and biases that timm supports, .*proj.weight must be":
        (MultiHeadAttention(N, v_head_dim=7), "timm"),
    "sizes and biases that haiku supports, .*missing key/b":
        (MultiHeadAttention(N, use_bias=("query",)), "haiku"),
    "sizes and biases that x-transformers supports, .*surplus to_q.bias":
        (LAYER, "x-transformers"),
    "library must be one of": (LAYER, "torch"),
    "maxtext applies no scale of its own, got .*scale=None": (LAYER, "maxtext"),
    "kauldron has no MultiHeadAttention with scale": (MultiHeadAttention(N, scale=1.0), "kauldron"),
}  # fmt: skip


@pytest.mark.parametrize("told", REFUSED)
def test_layers_that_library_lacks_raise(told: str) -> None:
    module, library = REFUSED[told]
    variables = random_variables(module, X)
    with pytest.raises(ValueError, match=told):
        interop.to_layer(module, variables, library)


@pytest.mark.parametrize("library", ["vit-pytorch", "keras"])
@pytest.mark.parametrize("module", [3, nn.Dense(3), nn.Sequential([nn.LayerNorm(), LAYER])])
def test_other_modules_raise(module: Any, library: str) -> None:
    told = f"nn.Sequential of nn.LayerNorm.1e-5. and one, got for {library}"
    with pytest.raises(TypeError, match=told):
        interop.to_layer(module, {}, library)
