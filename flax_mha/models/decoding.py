"""The compiled steps of `flax_mha.generate`: read tokens, choose the next, search beams."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import cache as caches
from flax_mha import sharding
from flax_mha.base import shapes
from flax_mha.base.arguments import names_of
from flax_mha.models.beams import BeamSearch, Generated, ends, extend
from flax_mha.models.models import LanguageModel, Translator
from flax_mha.sampling import Sampling

# A user-defined model, (variables, cache, tokens [R, T], positions [R, T]) -> (logits [R, T, V],
# cache).
Step = Callable[..., tuple[jax.Array, Any]]
Own = LanguageModel | Translator
Model = Own | Step
Rule = Sampling | BeamSearch


@dataclasses.dataclass(frozen=True)
class Request:
    """The static arguments of a call of `generate`, after its checks.

    The model has caches in its layers. Compiled code also depends on the logical axis `rules`.
    """

    model: Model
    max_new_tokens: int
    capacity: int
    start: tuple[int, ...] | None
    eos: tuple[int, ...] | None
    beams: int
    rules: Any


class State(struct.PyTreeNode):
    """The state of R sequences, `beams` consecutive ones for each prompt.

    Attributes:
      step: the number of generated tokens.
      results: the generated tokens; in a beam search the ended candidates.
      live: the other candidates of a beam search, which `last`, `at` and `cache` belong to; or
        None.
      last: [R], the newest token.
      at: [R], the position of the newest token.
      done: [R], True for a sequence, or a prompt's search, that has ended.
      cache: the model's cache.
      memory_lengths: [R], the lengths of the encoder's output; None without one.
    """

    step: jax.Array
    results: Generated
    live: Generated | None
    last: jax.Array
    at: jax.Array
    done: jax.Array
    cache: Any
    memory_lengths: jax.Array | None


def with_caches(model: Any) -> Any:
    """Return a model with caches in its decoder's layers, and a step unchanged."""
    if not isinstance(model, nn.Module):
        return model
    if isinstance(model, Translator):
        return model.clone(decoder=with_caches(model.decoder))
    blocks = tuple(map(_with_cache, model.decoder.blocks))
    return model.clone(decoder=model.decoder.clone(block=blocks))


def _with_cache(block: Any) -> Any:
    layers = {"attention": block.attention, "cross_attention": block.cross_attention}
    return block.clone(**{n: layer.clone(decode=True) for n, layer in layers.items() if layer})


@functools.partial(jax.jit, static_argnums=0)
def begin(
    request: Request, variables: Any, prompt: jax.Array, lengths: jax.Array, rule: Rule,
    rng: Any, cache: Any = None,
) -> State:  # fmt: skip
    """Create a cache if there is none, read the prompt, and choose the first token."""
    model: Any = request.model
    lengths, memory, memory_lengths = _constrain(lengths), None, None
    if reads_tokens := getattr(model, "reads_tokens", True):
        # Padding need not be an id of the vocabulary.
        real = jnp.arange(prompt.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        prompt = jnp.where(real, prompt, 0)
    tokens = _constrain(prompt)
    if request.start is not None:
        memory_lengths = lengths if reads_tokens else None
        memory = model.apply(
            variables, tokens, source_lengths=memory_lengths, deterministic=True, method="encode"
        )
        first = jnp.asarray(request.start, jnp.int32)[None]
        tokens = _constrain(jnp.broadcast_to(first, (len(tokens), first.shape[1])))
        lengths = jnp.full_like(lengths, first.shape[1])
    if cache is None:
        # A call without a cache creates one; XLA removes the rest of its computation.
        slots = jnp.zeros((len(tokens), request.capacity), jnp.int32)
        _, cache = _read(
            request, variables, None, slots, memory, at=jnp.zeros_like(lengths),
            memory_lengths=memory_lengths,
        )  # fmt: skip
    logits, cache = _read(
        request, variables, cache, tokens, at=lengths - 1, lengths=lengths,
        positions=jax.lax.broadcasted_iota(jnp.int32, tokens.shape[:2], 1),
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
    texts = jnp.full((R, request.max_new_tokens), (request.eos or (0,))[0], jnp.int32)
    results, live = Generated(texts, jnp.zeros_like(at), jnp.zeros(R, jnp.float32)), None
    if beams > 1:
        # All beams of a prompt are equal at first, so there is only the first one.
        is_first = jnp.arange(R) % beams == 0
        live = results._replace(scores=jnp.where(is_first, results.scores, -jnp.inf))
        results = results._replace(scores=results.scores - jnp.inf)
    results, live = jax.tree.map(_constrain, (results, live))
    state = State(jnp.int32(0), results, live, at, at, at < 0, cache, memory_lengths)
    return _choose(request, state, logits, rule, rng)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def advance(request: Request, variables: Any, state: State, rule: Rule, rng: Any) -> State:
    """Read the newest token, and choose the next."""
    logits, cache = _read(
        request, variables, state.cache, state.last[:, None],
        at=jnp.zeros_like(state.at), positions=state.at[:, None],
        memory_lengths=state.memory_lengths,
    )  # fmt: skip
    return _choose(request, state.replace(cache=cache), logits, rule, rng)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def finish(request: Request, variables: Any, state: State, rule: Rule, rng: Any) -> State:
    """Advance until all sequences have ended."""
    return jax.lax.while_loop(
        lambda state: ~ended(request, state),
        lambda state: advance(request, variables, state, rule, rng), state,
    )  # fmt: skip


def ended(request: Request, state: State) -> jax.Array:
    """Return True if all sequences have ended."""
    return (state.step == request.max_new_tokens) | jnp.all(state.done)


def best(request: Request, results: Generated) -> Generated:
    """Return the best candidate of each prompt, [B, …], from all candidates [R, …]."""
    first = jnp.arange(0, len(results.scores), request.beams)
    return results if request.beams == 1 else jax.tree.map(lambda x: _take(x, first), results)


def _read(
    request: Request, variables: Any, cache: Any, tokens: jax.Array,
    memory: jax.Array | None = None, *, at: jax.Array, **call: Any,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Read tokens, and return the logits [R, V] of the one at index `at`, and the new cache."""
    if not isinstance(request.model, Own):
        names = {"lengths"} & call.keys() & names_of(request.model)
        options = {name: call[name] for name in names}
        logits, cache = request.model(variables, cache, tokens, call["positions"], **options)
        last = jnp.take_along_axis(logits, at[:, None, None], axis=1)
        return _constrain(last[:, 0].astype(shapes.wide(logits.dtype))), cache
    method = "decode" if isinstance(request.model, Translator) else "__call__"
    collection = {} if cache is None else {"cache": cache}
    logits, new = request.model.apply(
        {**variables, **collection}, tokens, memory, at=at, deterministic=True, mutable=["cache"],
        method=method, **call,
    )  # fmt: skip
    return _constrain(logits[:, 0]), new["cache"]


def _choose(
    request: Request, state: State, logits: jax.Array, rule: Rule, rng: jax.Array | None
) -> State:
    """Choose the next token of each sequence."""
    eos, log_p = request.eos or (), jax.nn.log_softmax(logits, axis=-1).astype(jnp.float32)
    if isinstance(rule, BeamSearch):
        return _choose_beams(request, state, log_p, rule)
    key = None if rng is None else jax.random.fold_in(rng, state.step)
    token = rule.choose(key, logits)
    token = jnp.where(state.done, eos[0], token) if eos else token
    chosen = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None] == token[:, None]
    gained = jnp.where(state.done, 0.0, jnp.sum(log_p, axis=-1, where=chosen))
    is_step = jnp.arange(request.max_new_tokens, dtype=jnp.int32)[None] == state.step
    tokens, lengths, scores = state.results
    results = Generated(
        jnp.where(is_step, token[:, None], tokens), lengths + (~state.done).astype(jnp.int32),
        scores + gained,
    )  # fmt: skip
    return state.replace(
        step=state.step + 1, results=results, last=token, at=state.at + 1,
        done=state.done | ends(token, eos),
    )  # fmt: skip


def _choose_beams(request: Request, state: State, log_p: jax.Array, rule: BeamSearch) -> State:
    """Choose the best continuations of a prompt's live candidates."""
    row, text = jax.tree.map(lambda n: ("batch",) + (None,) * n, (0, 1))
    candidates = Generated(text, row, row)
    rows, token, live, results, done = sharding.auto(
        functools.partial(extend, request.beams, request.eos or ()),
        [row, row, candidates, candidates, row], log_p, state.live, state.results, state.done, rule,
    )  # fmt: skip
    return state.replace(
        step=state.step + 1, results=results, live=live, last=token, at=state.at + 1, done=done,
        cache=caches.fork(state.cache, rows),
    )  # fmt: skip


def _constrain(x: jax.Array) -> jax.Array:
    return sharding.constrain(x, ("batch", *[None] * (x.ndim - 1)))


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Take rows of x, sharded over the batch."""
    names = ("batch", *[None] * (x.ndim - 1))
    return sharding.auto(lambda x, rows: jnp.take(x, rows, axis=0), names, x, rows)
