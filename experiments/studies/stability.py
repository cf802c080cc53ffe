"""Do norms, clips of scores and Muon widen the range of learning rates that train?

    python -m experiments.studies.stability --figure=docs/_static/studies/stability.png

The models are decoders of bytes with 115,000 parameters. It takes 5 minutes of processor time.
docs/studies/stability.md has the answer. Source: Wortsman et al., "Small-scale proxies for
large-scale Transformer training instabilities", arXiv 2309.14322.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from experiments.studies import base
from experiments.studies.figures import COLORS, draw_band, make_panels, save, spread
from experiments.tasks import text
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import Capture, DecoderBlock, MultiHeadAttention, QKNorm, muon_dimensions, qk_clip
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.positions import Rotary

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
HIGH = 0.1  # the rate whose scores are shown
LENGTH, ROWS, TESTED = 32, 8, 64  # bytes of a window, windows of a batch and of the test
POINTS = 20  # measurements of a run
THRESHOLD = 50.0  # of the scores, for QK clip
UNIFORM = float(np.log(256))  # the loss of a guess


def make_variants() -> dict[str, tuple[Any, QKNorm | None, Any]]:
    """Return ways to train: Optax's optimizer for a rate of 1, a norm, and a clip of the scores.

    Muon's updates have the root mean square of Adam's, 0.2.
    """
    clip = optax.clip_by_global_norm(1.0)
    shapes = {"muon_weight_dimension_numbers": muon_dimensions}
    adam = optax.chain(clip, optax.adam(1.0, b2=0.95))
    muon = optax.chain(clip, contrib.muon(1.0, adam_b2=0.95, consistent_rms=0.2, **shapes))
    return {
        "plain (Adam)": (adam, None, None), "QK norm": (adam, QKNorm("rmsnorm"), None),
        "QK clip": (adam, None, qk_clip(THRESHOLD)), "Muon": (muon, None, None),
    }  # fmt: skip


def make_model(qk_norm: QKNorm | None) -> LanguageModel:
    """Return a pre-norm decoder of bytes with 115,000 parameters, which captures its scores."""
    fields: dict[str, Any] = {"qk_norm": qk_norm, "capture": Capture(("max_logit",))}
    attention = MultiHeadAttention(4, rotary=Rotary(), use_bias=False, **fields)
    block = DecoderBlock(attention, 256, norm="rmsnorm", activation="relu")
    return LanguageModel(TokenEmbedding(256, 64), Decoder(2, block))


def make_functions(name: str, steps: int) -> tuple[Callable[..., Any], ...]:
    """Return `create`, `step` and `probe` for `base.train`. Model i has seed i // rates."""
    optimizer, qk_norm, clip = make_variants()[name]
    model = make_model(qk_norm)
    tokens, held = (jnp.asarray(text.Bytes().encode(part)) for part in text.load())
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, round(0.1 * steps), steps)

    def draw(tokens: jax.Array, rows: int, key: jax.Array) -> jax.Array:
        starts = jax.random.randint(key, (rows, 1), 0, len(tokens) - LENGTH)
        return tokens[starts + jnp.arange(LENGTH + 1)[None]].astype(jnp.int32)

    def measure(params: Params, tokens: jax.Array) -> tuple[jax.Array, Any]:
        logits, sown = model.apply({"params": params}, tokens[:, :-1], mutable="intermediates")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), sown["intermediates"]

    def create(index: jax.Array) -> base.State:
        init_key, key = jax.random.split(jax.random.key(index // len(RATES)))
        params = model.init(init_key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
        rate = jnp.asarray(RATES, jnp.float32)[index % len(RATES)]
        return base.State(jnp.int32(0), params, (rate, optimizer.init(params)), key)

    def step(state: base.State, _: Batch) -> tuple[base.State, Metrics]:
        # The batch follows from the seed, so that all rates see the same data.
        rows = draw(tokens, ROWS, jax.random.fold_in(state.key, state.step))
        (loss, scores), grads = jax.value_and_grad(measure, has_aux=True)(state.params, rows)
        peak, opt_state = state.opt_state
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, opt_state = optimizer.update(grads, opt_state, state.params)
            rate = peak * schedule(state.step + 1)
        updates = jax.tree.map(lambda x: rate * x, updates)
        if clip:
            empty = clip.init(state.params)
            updates, _ = clip.update(updates, empty, state.params, max_logits=scores)
        params = optax.apply_updates(state.params, updates)
        score = jnp.max(jnp.stack([x.max() for x in jax.tree.leaves(scores)]))
        new = base.State(state.step + 1, params, (peak, opt_state), state.key)
        return new, {"loss": loss, "score": score}

    def probe(params: Params, key: jax.Array) -> Metrics:
        return {"test": measure(params, draw(held, TESTED, key))[0]}

    return create, step, probe


def sensitivity(losses: np.ndarray) -> np.ndarray:
    """Return the mean over rates of min(loss, ℓ₀) − min loss, of losses [seeds, rates].

    ℓ₀ is the loss of a guess, about that of a fresh model. A loss that is not finite counts as ℓ₀.
    """
    losses = np.minimum(np.nan_to_num(losses, nan=UNIFORM), UNIFORM)
    return np.mean(losses - losses.min(-1, keepdims=True), -1)


def main() -> None:
    """Train all variants, draw their losses and scores, and print them."""
    flags = base.read_flags(__doc__, steps=300, seeds=3)
    figure, (left, right) = make_panels({
        "Loss after training, sensitivity": ("peak learning rate", "test loss (nats per byte)"),
        f"Scores at a learning rate of {HIGH}": ("step", "largest score before the softmax"),
    })  # fmt: skip
    for name, color in zip(make_variants(), COLORS, strict=False):
        create, step, probe = make_functions(name, flags.steps)
        models, shape = flags.seeds * len(RATES), (-1, flags.seeds, len(RATES))
        out = base.train(create, step, lambda _: {}, flags.steps, models, POINTS, probe)
        final, scores = (out.found[key].reshape(shape) for key in ("test", "score"))
        final, narrow = final[-1], sensitivity(final[-1])
        draw_band(left, RATES, final.T, f"{name}: {np.median(narrow):.2f}", color)
        draw_band(right, out.steps, scores[:, :, RATES.index(HIGH)], name, color)
        print(f"{name}: sensitivity {spread(narrow)}")
        for rate, losses, score in zip(RATES, final.T, scores.max(0).T, strict=True):
            largest = f"largest score {np.median(score):.0f}"
            print(f"  {rate:6}: loss {spread(losses)}, {largest}")
    left.set_xscale("log")
    right.set_yscale("log")
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
