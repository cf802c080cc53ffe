"""The any_derivative context, errors without it, and the cost of `checkpointed`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, dot_product_attention, explain, kernels
from flax_mha.kernels.xla import tile_plan
from flax_mha.masks import BlockSparse, Causal, Lengths, Segments
from tests.support import oracle
from tests.support.meshes import changed


@pytest.mark.sampled(0.13, slow=0.2)
def test_auto_has_every_derivative_in_context() -> None:
    """Also for a function traced before, and not after the context."""
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 300, 2, 8)), jnp.float32)

    @jax.jit
    def loss(q: jax.Array) -> jax.Array:
        return (dot_product_attention(q, q, q, mask=Causal()) ** 2).sum()

    loss(q)
    with pytest.raises(TypeError, match="forward mode"):
        jax.jvp(loss, (q,), (q,))
    with kernels.any_derivative():
        slope = jax.jvp(loss, (q,), (q,))[1]
        assert explain(q, q, q).chosen == "checkpointed"
        assert explain(q[:, :100], q, q).chosen == "reference"
        told = explain(q, q, q, kernel="blockwise")
        assert told.chosen is None
        assert "not every derivative" in told.refused["blockwise"]
        with pytest.raises(ValueError, match=r"blockwise.*not every derivative"):
            dot_product_attention(q, q, q, kernel="blockwise")
    np.testing.assert_allclose(slope, jnp.vdot(jax.grad(loss)(q), q), rtol=1e-5)
    assert explain(q, q, q).chosen == "blockwise"
    with pytest.raises(TypeError, match="forward mode"):
        jax.jvp(loss, (q,), (q,))


def forward_modes(loss: Any, q: jax.Array) -> dict[str, Any]:
    """Return calls for forward mode. They raise in different places of JAX."""
    directions = jnp.stack([q, q])
    return {
        "eager": lambda: jax.jvp(loss, (q,), (q,)),
        "compiled": lambda: jax.jit(lambda q: jax.jvp(loss, (q,), (q,)))(q),
        "linear": lambda: jax.linearize(loss, q)[1](q),
        "mapped": lambda: jax.vmap(lambda t: jax.jvp(loss, (q,), (t,))[1])(directions),
        "differentiated": lambda: jax.grad(lambda q: jax.jvp(loss, (q,), (q,))[1])(q),
        "twice": lambda: jax.jvp(lambda q: jax.jvp(loss, (q,), (q,))[1], (q,), (q,)),
    }


@pytest.mark.parametrize("kernel", ["blockwise", "decode"])
def test_other_kernels_name_checkpointed_in_error(kernel: str) -> None:
    q = jnp.ones((1, 8, 2, 8))

    def loss(q: jax.Array) -> jax.Array:
        return dot_product_attention(q, q, q, kernel=kernel).sum()

    for ask in forward_modes(loss, q).values():
        with pytest.raises(TypeError, match=f"'checkpointed' .* forward mode .*'{kernel}'; name"):
            ask()
    if kernel == "decode":
        with pytest.raises(TypeError, match=r"'checkpointed' .* forward mode .*'decode'"):
            jax.jvp(jax.grad(loss), (q,), (q,))


def twice(attend: Any, q: jax.Array) -> dict[str, Any]:
    """Return calls for reverse mode over gradients, which meet the loops in different places of
    JAX.
    """

    def loss(q: jax.Array, w: jax.Array) -> jax.Array:
        return (attend(q) ** 2 * w).sum()

    def slope(q: jax.Array, loss: Any = loss) -> jax.Array:
        return (jax.grad(loss)(q, q) ** 2).sum()

    def along(q: jax.Array) -> jax.Array:
        return jax.jvp(lambda x: jax.grad(loss)(x, q), (q,), (q,))[1].sum()

    return {
        "plain": jax.grad(slope),
        "rematerialised": jax.grad(lambda q: slope(q, jax.checkpoint(loss))),
        "mapped": lambda q: jax.vmap(jax.grad(slope))(q[None]),
        "of other arguments": jax.grad(lambda q: jax.grad(loss, (0, 1))(q, q)[1].sum()),
        "third": jax.grad(along),
    }


SCATTERED = BlockSparse(np.tile(np.array([[0, 5]], np.int32), (1, 1, 25, 1)), 8, 8)


@pytest.mark.sampled(0.16)
@pytest.mark.parametrize(
    "mask",
    [Segments(jnp.zeros((1, 200), jnp.int32)), Lengths(jnp.array([5])), SCATTERED],
    ids=["segments", "lengths", "known, scattered"],
)
def test_reverse_over_gradient_of_tilewise_masks_raises(mask: Any, monkeypatch) -> None:
    """Forward mode over the gradients works."""
    monkeypatch.setattr(tile_plan, "_SHORT", 0)
    q = jnp.ones((1, 200, 1, 4))

    def attend(q: jax.Array, mask: Any) -> jax.Array:
        return dot_product_attention(q, q, q, mask=mask, kernel="blockwise")

    def trace(differentiate: Any) -> Any:
        # The mask's arrays are arguments.
        leaves, tree = jax.tree.flatten(mask)
        known = [isinstance(x, np.ndarray) for x in leaves]

        def run(q: jax.Array, given: Any) -> Any:
            given = [x if k else g for x, g, k in zip(leaves, given, known, strict=True)]
            return differentiate(lambda q: attend(q, jax.tree.unflatten(tree, given)))(q)

        return jax.make_jaxpr(run)(q, leaves)

    trace(lambda f: lambda q: jax.jvp(jax.grad(lambda q: f(q).sum()), (q,), (q,)))
    for name in twice(None, q):
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            trace(lambda f, name=name: twice(f, q)[name])


@pytest.mark.parametrize("kernel", ["short", "flex", "splash"])
def test_kernels_without_second_derivatives_raise(tpu: None, kernel: str) -> None:
    q = jnp.ones((1, 128, 1, 8))

    def loss(q: jax.Array) -> jax.Array:
        return dot_product_attention(q, q, q, kernel=kernel).sum()

    with pytest.raises(TypeError, match=f"'checkpointed' .* forward mode .*'{kernel}'"):
        jax.eval_shape(lambda q: jax.vmap(lambda t: jax.jvp(loss, (q,), (t,))[1])(q[None]), q)
    for twice in (
        lambda q: jax.jvp(jax.grad(loss), (q,), (q,)),
        jax.grad(lambda q: jax.grad(loss)(q).sum()),
    ):
        with pytest.raises(TypeError, match=f"derivatives of derivatives, got '{kernel}'"):
            jax.eval_shape(twice, q)


def multiplications(program: Any) -> int:
    """Return the multiplications in a program's matmuls, with every loop iteration."""
    total = 0
    for eqn in program.eqns:
        nodes = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "jaxpr"))
        inside = [multiplications(getattr(x, "jaxpr", x)) for x in nodes if hasattr(x, "eqns")]
        if eqn.primitive.name == "dot_general":
            ((axes, _), _), shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
            total += eqn.outvars[0].aval.size * np.prod([shape[a] for a in axes], dtype=int)
        elif eqn.primitive.name == "cond":
            # A skipped tile costs nothing.
            assert min(inside) == 0
            total += max(inside)
        else:
            total += sum(inside) * eqn.params.get("length", 1)
    return total


def test_excluded_tiles_are_skipped() -> None:
    """A causal mask skips nearly half, in forward mode and in reverse mode."""
    q = jax.ShapeDtypeStruct((1, 2048, 1, 64), jnp.float32)

    def count(mask: Any, differentiate: Any) -> int:
        def attend(q: jax.Array) -> jax.Array:
            return dot_product_attention(q, q, q, mask=mask, kernel="checkpointed").sum()

        return multiplications(jax.make_jaxpr(lambda q: differentiate(attend, q))(q).jaxpr)

    for way in (lambda f, q: jax.jvp(f, (q,), (q,)), lambda f, q: jax.grad(f)(q)):
        assert 0.5 < count(Causal(), way) / count(None, way) < 0.7
    # A traced mask skips tiles at run time, in a branch without matmuls.
    assert count(Lengths(np.array([5])), lambda f, q: f(q)) < count(None, lambda f, q: f(q))


def temporaries(T: int, differentiate: Any, kernel: str = "checkpointed") -> int:
    """Return the bytes of temporaries in the compiled program."""
    q = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.float32)

    @jax.jit
    def run(q: jax.Array, lengths: jax.Array) -> Any:
        mask = Causal() & Lengths(lengths)

        def loss(q: jax.Array) -> jax.Array:
            return (dot_product_attention(q, q, q, mask=mask, kernel=kernel) ** 2).sum()

        return differentiate(loss, q)

    compiled = run.lower(q, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


WAYS = {
    "jvp": lambda f, q: jax.jvp(f, (q,), (q,))[1],
    "grad": lambda f, q: jax.grad(f)(q),
    "jvp of grad": lambda f, q: jax.jvp(jax.grad(f), (q,), (q,))[1],
    "grad of jvp": lambda f, q: jax.grad(lambda q: jax.jvp(f, (q,), (q,))[1])(q),
    "grad of grad": lambda f, q: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), q))(q),
}


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize(
    "way", ["jvp", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "jvp")]
)
def test_memory_is_linear_in_the_length(way: str) -> None:
    """Four times the tokens take at most four times the memory. Plain einsums would take
    sixteen.
    """
    short, long = (temporaries(T, WAYS[way]) for T in (1024, 4096))
    assert long < 4.2 * short
    # Less than one array of all scores.
    assert long < 4096**2 * 4


def test_usp_refuses_forward_mode() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    x = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
    with jax.set_mesh(mesh), nn.logical_axis_rules([("length", ("data", "model"))]):
        assert explain(x, x, x).strategy == "usp"
        assert explain(x, x, x, kernel="checkpointed").strategy == "all_gather"
        refused = explain(x, x, x, kernel="checkpointed", normalizer="sigmoid").refused["usp"]
        assert "merges parts of a softmax" in refused
        with kernels.any_derivative():
            assert "not every derivative" in explain(x, x, x).refused["usp"]


def test_ring_refuses_forward_mode() -> None:
    mesh = jax.make_mesh((1, 8), ("data", "model"))
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    rules = changed(heads=None, kv_heads=None, batch=None, length="model", mlp=None, vocab=None)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        assert explain(x, x, x).strategy == "ring"
        tangent = jax.jit(lambda x: jax.jvp(lambda x: dot_product_attention(x, x, x), (x,), (x,)))
        with pytest.raises(TypeError, match=r"forward mode .*, got 'ring'"):
            tangent.lower(x)
        told = explain(x, x, x, kernel="checkpointed")
        assert (told.strategy, told.chosen) == ("all_gather", "checkpointed")
        with kernels.any_derivative():
            assert explain(x, x, x).strategy == "all_gather"
            assert "not every derivative" in explain(x, x, x, kernel="ring").refused["ring"]


@pytest.mark.slow
def test_hessian_vector_products_of_layer_match_reference() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 300, 16)), jnp.float32)
    layer = MultiHeadAttention(2, mask=Causal())
    params = layer.init(jax.random.key(0), x)

    def product(layer: MultiHeadAttention) -> Any:
        def loss(params: Any) -> jax.Array:
            return (layer.apply(params, x) ** 2).sum()

        return jax.jvp(jax.grad(loss), (params,), (params,))[1]

    with kernels.any_derivative():
        got = product(layer)
    want = product(layer.clone(kernel="reference"))
    for products in (got, want):
        # No output depends on the bias of keys: the exact product is 0, among others of hundreds.
        assert np.abs(products["params"]["key"].pop("bias")).max() < 1e-4
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.error(one, other) < 2e-5
