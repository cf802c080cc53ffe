"""The steps of `flax_mha.generate`, traced: read tokens, choose the next, follow beams."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import cache as caches
from flax_mha import sharding
from flax_mha.base import shapes
from flax_mha.models.models import LanguageModel, Translator
from flax_mha.models.sampling import Sampling

# (variables, cache, tokens [R, T], positions [R, T]) -> (logits [R, T, V], cache): anybody's model.
Step = Callable[..., tuple[jax.Array, Any]]
Own = LanguageModel | Translator
Model = Own | Step


def takes_lengths(step: Step) -> bool:
    """Return True if a step takes how many tokens of each row are real."""
    return "lengths" in inspect.signature(step).parameters


@dataclasses.dataclass(frozen=True)
class Request:
    """What is known before tracing."""

    model: Model
    max_new_tokens: int
    capacity: int
    start: tuple[int, ...] | None
    eos: tuple[int, ...] | None  # each ends a row; the first one fills what follows
    beams: int
    rules: Any  # that were ambient: a trace holds for those


class State(struct.PyTreeNode):
    """What a step reads and writes; of R rows, `beams` in succession belong to a prompt.

    Attributes:
      step: how many tokens were chosen.
      tokens: [R, max_new_tokens], those.
      last: [R], the newest.
      at: [R], where it stands.
      done: [R], whether the row has ended.
      lengths: [R], its tokens up to its end.
      scores: [R], their log-probability.
      cache: of the model.
      memory_lengths: [R], or None for a model without a memory.
    """

    step: jax.Array
    tokens: jax.Array
    last: jax.Array
    at: jax.Array
    done: jax.Array
    lengths: jax.Array
    scores: jax.Array
    cache: Any
    memory_lengths: jax.Array | None


def with_caches(model: Any) -> Any:
    """Return the model with caches in the layers of its decoder; a step as it is."""
    if not isinstance(model, nn.Module):
        return model
    if isinstance(model, Translator):
        return model.clone(decoder=with_caches(model.decoder))
    blocks = tuple(map(_cached, model.decoder.blocks))
    return model.clone(decoder=model.decoder.clone(block=blocks))


def _cached(block: Any) -> Any:
    layers = {"attention": block.attention, "cross_attention": block.cross_attention}
    return block.clone(**{n: layer.clone(decode=True) for n, layer in layers.items() if layer})


@functools.partial(jax.jit, static_argnums=0)
def begin(
    request: Request,
    variables: Any,
    prompt: jax.Array,
    lengths: jax.Array,
    sampling: Sampling,
    rng: Any,
    cache: Any = None,
) -> State:
    """Make a cache if there is none, read the prompt, and choose the first token."""
    model: Any = request.model
    memory, memory_lengths = None, None
    lengths = _by_rows(lengths)
    if getattr(model, "reads_tokens", True):
        # What is no token need not be one of the vocabulary.
        real = jnp.arange(prompt.shape[1])[None] < lengths[:, None]
        tokens = _by_rows(jnp.where(real, prompt, 0))
        memory_lengths = None if request.start is None else lengths
    else:
        tokens = _by_rows(prompt)
    if request.start is not None:
        memory = model.apply(
            variables, tokens, source_lengths=memory_lengths, deterministic=True, method="encode"
        )
        first = jnp.asarray(request.start, jnp.int32)[None]
        tokens = _by_rows(jnp.broadcast_to(first, (len(tokens), first.shape[1])))
        lengths = jnp.full_like(lengths, first.shape[1])
    if cache is None:
        # A call without a cache makes one; of what else it computes nothing is left when compiled.
        room = jnp.zeros((len(tokens), request.capacity), jnp.int32)
        _, cache = _read(request, variables, None, room, memory, at=jnp.zeros_like(lengths))
    logits, cache = _read(
        request, variables, cache, tokens, at=lengths - 1, lengths=lengths,
        positions=jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape),
        memory_lengths=memory_lengths,
    )  # fmt: skip
    at, beams = lengths - 1, request.beams
    if beams > 1:
        owners = jnp.repeat(jnp.arange(len(tokens)), beams)
        cache = caches.fork(cache, owners)
        logits, at, memory_lengths = jax.tree.map(
            lambda x: _take(x, owners), (logits, at, memory_lengths)
        )
    R = len(at)
    # The beams of a prompt are all the same as yet: one of them counts.
    scores = jnp.where(jnp.arange(R) % beams == 0, 0.0, -jnp.inf).astype(jnp.float32)
    chosen = jnp.full((R, request.max_new_tokens), (request.eos or (0,))[0], jnp.int32)
    state = State(
        jnp.int32(0), _by_rows(chosen), at, at, at < 0, jnp.zeros_like(at), _by_rows(scores),
        cache, memory_lengths,
    )  # fmt: skip
    return _choose(request, state, logits, sampling, rng)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def advance(request: Request, variables: Any, state: State, sampling: Sampling, rng: Any) -> State:
    """Read the newest token, and choose the next."""
    logits, cache = _read(
        request, variables, state.cache, state.last[:, None],
        at=jnp.zeros_like(state.at), positions=state.at[:, None],
        memory_lengths=state.memory_lengths,
    )  # fmt: skip
    return _choose(request, state.replace(cache=cache), logits, sampling, rng)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def finish(request: Request, variables: Any, state: State, sampling: Sampling, rng: Any) -> State:
    """Advance until all rows have ended."""
    return jax.lax.while_loop(
        lambda state: ~ended(request, state),
        lambda state: advance(request, variables, state, sampling, rng),
        state,
    )


def ended(request: Request, state: State) -> jax.Array:
    """Return True if every row has its tokens."""
    # The best beam comes first, and none below it can pass it any more: scores only fall.
    return (state.step == request.max_new_tokens) | jnp.all(best(request, state.done))


def best(request: Request, x: jax.Array) -> jax.Array:
    """Return the best row of each prompt, [B, …], of rows [R, …]."""
    return x if request.beams == 1 else _take(x, jnp.arange(0, len(x), request.beams))


def _read(
    request: Request, variables: Any, cache: Any, tokens: jax.Array,
    memory: jax.Array | None = None, *, at: jax.Array, **call: Any,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Return logits [R, V] of the token at `at`, and the cache after all of them."""
    if not isinstance(request.model, Own):
        has_lengths = "lengths" in call and takes_lengths(request.model)
        options = {"lengths": call["lengths"]} if has_lengths else {}
        logits, cache = request.model(variables, cache, tokens, call["positions"], **options)
        last = jnp.take_along_axis(logits, at[:, None, None], axis=1)
        return _by_rows(last[:, 0].astype(shapes.wide(logits.dtype))), cache
    method = "decode" if isinstance(request.model, Translator) else "__call__"
    held = {} if cache is None else {"cache": cache}
    logits, new = request.model.apply(
        {**variables, **held}, tokens, memory, at=at, deterministic=True, mutable=["cache"],
        method=method, **call,
    )  # fmt: skip
    return _by_rows(logits[:, 0]), new["cache"]


def _choose(
    request: Request, state: State, logits: jax.Array, sampling: Sampling, rng: jax.Array | None
) -> State:
    log_p = jax.nn.log_softmax(logits, axis=-1)
    if request.beams > 1:
        return _choose_beams(request, state, log_p)
    key = None if rng is None else jax.random.fold_in(rng, state.step)
    token = sampling.choose(key, logits)
    if request.eos is not None:
        token = jnp.where(state.done, request.eos[0], token)
    chosen = jnp.arange(logits.shape[-1])[None] == token[:, None]
    gained = jnp.sum(log_p, axis=-1, where=chosen)
    return _append(request, state, token, jnp.where(state.done, 0.0, gained) + state.scores)


def _choose_beams(request: Request, state: State, log_p: jax.Array) -> State:
    """Choose the best continuations of a prompt's beams, best first."""
    beams, V = request.beams, log_p.shape[-1]

    def rank(log_p: jax.Array, done: jax.Array, scores: jax.Array) -> list[jax.Array]:
        if request.eos is not None:
            # What has ended goes on as it is.
            stay = jnp.where(jnp.arange(V)[None] == request.eos[0], 0.0, -jnp.inf)
            log_p = jnp.where(done[:, None], stay, log_p)
        total = (scores[:, None] + log_p).reshape(-1, beams * V)
        scores, flat = jax.lax.top_k(total, beams)
        rows = flat // V + beams * jnp.arange(len(flat))[:, None]
        return [x.reshape(-1) for x in (rows, flat % V, scores)]

    names = [("batch",)] * 3
    rows, token, scores = sharding.auto(rank, names, log_p, state.done, state.scores)
    state = state.replace(
        tokens=_take(state.tokens, rows), done=_take(state.done, rows),
        lengths=_take(state.lengths, rows), cache=caches.fork(state.cache, rows),
    )  # fmt: skip
    return _append(request, state, token, scores)


def _append(request: Request, state: State, token: jax.Array, scores: jax.Array) -> State:
    here = jnp.arange(request.max_new_tokens)[None] == state.step
    done = functools.reduce(lambda done, eos: done | (token == eos), request.eos or (), state.done)
    return state.replace(
        step=state.step + 1, last=token, at=state.at + 1, done=done, scores=scores,
        tokens=jnp.where(here, token[:, None], state.tokens),
        lengths=state.lengths + (~state.done).astype(jnp.int32),
    )  # fmt: skip


def _by_rows(x: jax.Array) -> jax.Array:
    return sharding.constrain(x, ("batch", *[None] * (x.ndim - 1)))


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Divide the rows of x, so that each device keeps its own."""
    names = ("batch", *[None] * (x.ndim - 1))
    return sharding.auto(lambda x, rows: jnp.take(x, rows, axis=0), names, x, rows)
