"""Do norms, clips of scores and Muon widen the range of learning rates that train?

    python -m experiments.studies.stability --figure=docs/_static/studies/stability.png

The models are decoders of bytes with 115,000 parameters. docs/studies/stability.md has the answer.
Source: Wortsman et al., arXiv 2309.14322.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
UNIFORM = float(np.log(256))  # the loss of a guess

ADAM = optax.adam(1.0, b2=0.95)
SHAPES = {"muon_weight_dimension_numbers": muon_dimensions}
NO_CLIP = optax.with_extra_args_support(optax.identity())
# An optimizer for a rate of 1, a norm of queries and keys, and a clip of the scores.
VARIANTS: dict[str, tuple[Any, QKNorm | None, Any]] = {
    "plain (Adam)": (ADAM, None, NO_CLIP),
    "QK norm": (ADAM, QKNorm("rmsnorm"), NO_CLIP),
    "QK clip": (ADAM, None, qk_clip(50.0)),
    # The updates have the root mean square of Adam's, 0.2.
    "Muon": (optax.contrib.muon(1.0, adam_b2=0.95, consistent_rms=0.2, **SHAPES), None, NO_CLIP),
}


def make_functions(name: str, steps: int) -> tuple[Any, Any, Any]:
    """Return `create`, `step` and `probe` for `base.train`. Model i has seed i // rates."""
    optimizer, qk_norm, clip = VARIANTS[name]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    capture = Capture(("max_logit",))
    layer = MultiHeadAttention(4, rotary=Rotary(), use_bias=False, qk_norm=qk_norm, capture=capture)
    block = DecoderBlock(layer, 256, norm="rmsnorm", activation="relu")
    model = LanguageModel(TokenEmbedding(256, 64), Decoder(2, block))
    tokens, held = (jnp.asarray(text.Bytes().encode(part)) for part in text.load())
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, round(0.1 * steps), steps)

    def measure(params: Params, source: Any, rows: int, key: jax.Array) -> tuple[jax.Array, Any]:
        starts = jax.random.randint(key, (rows, 1), 0, len(source) - LENGTH)
        batch = base.label_next(source[starts + jnp.arange(LENGTH + 1)[None]].astype(jnp.int32))
        logits, sown = model.apply({"params": params}, batch["tokens"], mutable="intermediates")
        return base.score(logits, batch), sown["intermediates"]

    def create(index: jax.Array) -> base.State:
        init_key, key = jax.random.split(jax.random.key(index // len(RATES)))
        params = model.init(init_key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
        rate = jnp.asarray(RATES, jnp.float32)[index % len(RATES)]
        return base.State(jnp.int32(0), params, (rate, optimizer.init(params)), key)

    def step(state: base.State, _: Batch) -> tuple[base.State, Metrics]:
        # The batch follows from the seed, so that all rates see the same data.
        key, params = jax.random.fold_in(state.key, state.step), state.params
        (loss, scores), grads = jax.value_and_grad(measure, has_aux=True)(params, tokens, ROWS, key)
        peak, opt_state = state.opt_state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        updates = jax.tree.map(lambda x: peak * schedule(state.step + 1) * x, updates)
        updates, _ = clip.update(updates, clip.init(params), params, max_logits=scores)
        new = optax.apply_updates(params, updates), (peak, opt_state), state.key
        found = {"loss": loss, "score": jax.tree.reduce(jnp.maximum, scores).max()}
        return base.State(state.step + 1, *new), found

    return create, step, lambda params, key: {"test": measure(params, held, TESTED, key)[0]}


def sensitivity(losses: np.ndarray) -> np.ndarray:
    """Return the mean over rates of min(loss, ℓ₀) − min loss, with ℓ₀ the loss of a guess."""
    losses = np.minimum(np.nan_to_num(losses, nan=UNIFORM), UNIFORM)
    return np.mean(losses - losses.min(-1, keepdims=True), -1)


def main() -> None:
    """Train all variants, draw their losses and scores, and print them."""
    flags = base.read_flags(__doc__, steps=300, seeds=3)
    figure, (left, right) = make_panels({
        "Loss after training, sensitivity": ("peak learning rate", "test loss (nats per byte)"),
        f"Scores at a learning rate of {HIGH}": ("step", "largest score before the softmax"),
    })  # fmt: skip
    for name, color in zip(VARIANTS, COLORS, strict=False):
        create, step, probe = make_functions(name, flags.steps)
        models, shape = flags.seeds * len(RATES), (-1, flags.seeds, len(RATES))
        out = base.train(create, step, lambda _: {}, flags.steps, models, 20, probe)
        losses, scores = (out.found[key].reshape(shape) for key in ("test", "score"))
        found, final = sensitivity(losses[-1]), losses[-1].T
        draw_band(left, RATES, final, f"{name}: {np.median(found):.2f}", color)
        draw_band(right, out.steps, scores[:, :, RATES.index(HIGH)], name, color)
        print(f"{name}: sensitivity {spread(found)}")
        for rate, loss, score in zip(RATES, final, scores.max(0).T, strict=True):
            print(f"  {rate:6}: loss {spread(loss)}, largest score {np.median(score):.0f}")
    left.set_xscale("log")
    right.set_yscale("log")
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
