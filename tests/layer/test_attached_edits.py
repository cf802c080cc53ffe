"""Edits attached to models: strangers' scans, sweeps, errors, and their cost."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict

import flax_mha
from flax_mha import Capture, Encoder, EncoderBlock, MultiHeadAttention, edits, masks
from flax_mha.edits import Edit
from tests.layer.test_edits import LAYERS, B, D, H, K, N, T, X, named, variables


class Stranger(nn.Module):
    """A model of somebody else, whose scan passes only parameters, unless it is told of more."""

    capture: Capture | None = None
    sow_weights: bool = False
    passes: tuple[str, ...] = ("params",)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def step(layer: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + layer(x, sow_weights=self.sow_weights), None

        axes = dict.fromkeys(self.passes, 0)
        scanned = nn.scan(step, variable_axes=axes, split_rngs={"params": True}, length=3)
        layer = MultiHeadAttention(N, name="attention", capture=self.capture)
        return scanned(layer, x, None)[0]


@pytest.mark.parametrize("asked", [{"capture": Capture(("z",))}, {"sow_weights": True}])
def test_a_capture_that_a_scan_drops_is_a_warning(asked: dict[str, Any]) -> None:
    def sown(model: nn.Module, mutable: Any) -> Any:
        return jax.eval_shape(lambda v: model.apply(v, X, mutable=mutable)[1], values)

    values = jax.eval_shape(Stranger(**asked).init, jax.random.key(0), X)
    with pytest.warns(UserWarning, match="capture of attention is lost.* give nn.scan"):
        assert not sown(Stranger(**asked), "intermediates")
    # Not wanted, or not lost.
    assert not sown(Stranger(), "intermediates")
    assert not sown(Stranger(**asked), "cache")
    assert sown(Stranger(**asked, passes=("params", "intermediates")), "intermediates")


def test_edits_that_a_scan_drops_are_refused() -> None:
    values = variables(Stranger(), X)
    changes = {"attention/attention_z": {2: Edit(keep=np.array([[1], [0], [1], [1]]))}}
    with pytest.raises(ValueError, match=r"must pass edits to .*attention_z.*nn\.scan"):
        edits.attach(Stranger(), values, changes, X)
    model = Stranger(passes=("params", "edits"))
    attached = edits.attach(model, values, changes, X)
    mask = np.ones((3, N))
    mask[2, 1] = 0
    x = jnp.asarray(X)
    for i in range(3):
        params = jax.tree.map(lambda p, i=i: p[i], values["params"]["attention"])
        x = x + MultiHeadAttention(N).apply({"params": params}, x, head_mask=jnp.asarray(mask[i]))
    np.testing.assert_allclose(model.apply(attached, X), x, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.sampled(0.3, slow=0.3)
def test_a_sweep_is_a_loop() -> None:
    model = Encoder(2, EncoderBlock(LAYERS["grouped"], 32))
    values = variables(model, X)
    heads = [(i, n) for i in range(2) for n in range(N)]
    keep = 1 - np.eye(2 * N).reshape(2 * N, 2, N, 1)
    each = {f"layers_{i}/attention/attention_z": Edit(keep[:, i]) for i in range(2)}

    def run(changes: Any, values: Any) -> jax.Array:
        return model.apply({**values, "edits": unflatten_dict(changes, sep="/")}, X)

    swept = edits.sweep(run, each, values, batch_size=3)
    for (layer, head), out in zip(heads, swept, strict=True):
        masked = [jnp.ones(N), jnp.ones(N)]
        masked[layer] = masked[layer].at[head].set(0)
        np.testing.assert_allclose(out, model.apply(values, X, head_mask=masked), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_zz": Edit()}, r"must be of tensors of the model, got 'attention_zz'"),
        ({"layer/attention_z": Edit()}, "got .*'layer/attention_z'"),
        ({"attention_z": Edit(np.ones(3))}, r"`keep` of the edit attention_z must broadcast"),
        ({"attention_z": Edit(add=np.ones((3, B, T, N, H)))}, "`add` of the edit"),
        ({"attention_z": Edit(0, heads=(1,))}, "heads of an edit must be None but for"),
        ({"attention_weights": Edit(heads=(9,))}, r"heads must be in \[-4, 4\)"),
        ({"attention_weights": Edit(np.ones((3, 1, 1)), heads=(1, 2))}, "must broadcast"),
    ],
)
def test_a_wrong_edit_is_an_error(changes: Any, message: str) -> None:
    layer = LAYERS["grouped"]
    values = variables(layer, X)
    with pytest.raises(ValueError, match=message):
        edits.attach(layer, values, changes, X)
    twin = flax_mha.nnx.MultiHeadAttention(N, D, num_kv_heads=K, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        edits.attach(twin, changes, X)
    assert twin.edits is None


@pytest.mark.parametrize("value", [3.0, {0: Edit()}])
def test_a_value_that_is_no_edit_is_an_error(value: Any) -> None:
    layer = LAYERS["grouped"]
    twin = flax_mha.nnx.MultiHeadAttention(N, D, num_kv_heads=K, rngs=nnx.Rngs(0))
    for model, first in ((layer, (variables(layer, X),)), (twin, ())):
        with pytest.raises(TypeError, match="the edit of attention_z must be an Edit, or under"):
            edits.attach(model, *first, {"attention_z": value}, X)


@pytest.mark.sampled(0.13, slow=0.2)
def test_edits_that_find_no_point_in_a_call_are_an_error() -> None:
    layer = LAYERS["grouped"]
    values = variables(layer, X)
    with pytest.raises(ValueError, match=r"edits must be of tensors that the call .*attention_y"):
        layer.apply({**values, "edits": {"attention_y": Edit()}}, X)
    dropout = LAYERS["grouped"].clone(dropout_rate=0.5, deterministic=False)
    attached = {**values, "edits": named({"weights": Edit(keep=0)})}
    with pytest.raises(ValueError, match="needs a call without dropout"):
        dropout.apply(attached, X, rngs={"dropout": jax.random.key(0)})


def test_reading_costs_nothing_unless_asked() -> None:
    layer = LAYERS["grouped"]
    values = variables(layer, X)
    watched = layer.clone(capture=Capture(("q", "z", "result", "scores")))

    def program(layer: nn.Module) -> str:
        return jax.jit(layer.apply).lower(values, X).as_text()

    assert program(watched) == program(layer)


@pytest.mark.sampled(0.13, slow=0.2)
def test_no_square_buffer_for_tensors_of_tokens() -> None:
    layer = MultiHeadAttention(8, kernel="blockwise", mask=masks.Causal())
    x = jnp.ones((1, 4096, 64))
    values = variables(layer, x)
    head = np.ones((8, 1, 1))
    changes = {name: Edit(keep=np.ones(8)[:, None]) for name in ("q", "k", "v", "z")}
    changes["scores"] = Edit(keep=head)

    def memory(chosen: Any) -> float:
        run = jax.jit(jax.grad(lambda v: layer.apply(v, x).sum()))
        variables_ = {**values, "edits": named(chosen)}
        return run.lower(variables_).compile().memory_analysis().temp_size_in_bytes / 2**20

    assert memory(changes) < memory({}) + 40
