"""The compiled steps of `flax_mha.generate`: read tokens, choose the next, search beams."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import cache as caches
from flax_mha import sharding
from flax_mha.base import shapes
from flax_mha.base.arguments import names_of
from flax_mha.models.models import LanguageModel, Translator
from flax_mha.sampling import Sampling

# A user-defined model, (variables, cache, tokens [R, T], positions [R, T]) -> (logits [R, T, V],
# cache).
Step = Callable[..., tuple[jax.Array, Any]]
Own = LanguageModel | Translator
Model = Own | Step


class Generated(NamedTuple):
    """The result of `generate`.

    Attributes:
      tokens: int32 [B, max_new_tokens], padded with the first eos after the end of a sequence.
      lengths: int32 [B], the number of tokens up to and including eos.
      scores: float32 [B], the sum of the log-probabilities of these tokens, at temperature 1 among
        all tokens. With beams it is divided by lengths ** length_penalty.
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array


@dataclasses.dataclass(frozen=True)
class Request:
    """The static arguments of a call of `generate`, after its checks.

    The model has caches in its layers.
    """

    model: Model
    max_new_tokens: int
    capacity: int
    start: tuple[int, ...]
    eos: tuple[int, ...]
    beams: int
    early_stopping: bool | str
    rules: Any


class State(struct.PyTreeNode):
    """The state of R sequences, `beams` consecutive ones for each prompt.

    Attributes:
      step: the number of generated tokens.
      live: the generated tokens; in a beam search the candidates that have not ended, best first.
      ended: the candidates of a beam search that have ended, best first.
      last: [R], the newest token of `live`.
      at: [R], its position.
      done: [R], True for a sequence, or a prompt's search, that has ended.
      cache: the model's cache.
      memory_lengths: [R], the lengths of the encoder's output.
    """

    step: jax.Array
    live: Generated
    ended: Generated | None
    last: jax.Array
    at: jax.Array
    done: jax.Array
    cache: Any
    memory_lengths: jax.Array | None


def with_caches(model: Any) -> Any:
    """Return a model with caches in its decoder's layers, and a step unchanged."""
    if isinstance(model, Translator):
        return model.clone(decoder=with_caches(model.decoder))
    if not isinstance(model, LanguageModel):
        return model

    def cached(layer: Any) -> Any:
        return layer and layer.clone(decode=True)

    blocks: Any = model.decoder.blocks
    blocks = tuple(
        x.clone(attention=cached(x.attention), cross_attention=cached(x.cross_attention))
        for x in blocks
    )
    return model.clone(decoder=model.decoder.clone(block=blocks))


@functools.partial(jax.jit, static_argnums=0)
def begin(
    request: Request, variables: Any, prompt: jax.Array, lengths: jax.Array,
    rule: Sampling | jax.Array, rng: Any, cache: Any = None,
) -> State:  # fmt: skip
    """Create a cache if there is none, read the prompt, and choose the first token.

    Arguments are as in `generate`. `rule` is a `Sampling`, or the length penalty of a beam search.
    """
    model: Any = request.model
    tokens, lengths = _constrain(prompt), _constrain(lengths)
    memory = memory_lengths = None
    if request.start:
        memory_lengths = lengths if model.reads_tokens else None
        memory = model.apply(
            variables, tokens, source_lengths=memory_lengths, deterministic=True, method="encode"
        )
        count = len(request.start)
        first = jnp.asarray(request.start, jnp.int32)
        tokens = _constrain(jnp.broadcast_to(first, (len(prompt), count)))
        lengths = jnp.full_like(lengths, count)
    at, beams = lengths - 1, request.beams
    read = functools.partial(_read, request, variables, memory_lengths=memory_lengths)
    if cache is None:
        # A call without a cache creates one; XLA removes the rest.
        slots = jnp.zeros((len(tokens), request.capacity), jnp.int32)
        _, cache = read(None, slots, memory, at=jnp.zeros_like(at))
    positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape[:2], 1)
    logits, cache = read(cache, tokens, at=at, lengths=lengths, positions=positions)
    if beams > 1:
        owners = jnp.repeat(jnp.arange(len(tokens)), beams)
        cache = caches.fork(cache, owners)
        logits, at, memory_lengths = _take((logits, at, memory_lengths), owners)
    texts = jnp.full((len(at), request.max_new_tokens), (*request.eos, 0)[0], jnp.int32)
    live = Generated(texts, jnp.zeros_like(at), jnp.zeros(len(at), jnp.float32))
    live, ended = jax.tree.map(_constrain, live), None
    if beams > 1:
        ended = live._replace(scores=live.scores - jnp.inf)
        # All beams of a prompt are equal at first, so there is only the first one.
        is_first = jnp.arange(len(at)) % beams == 0
        live = live._replace(scores=jnp.where(is_first, live.scores, -jnp.inf))
    state = State(jnp.int32(0), live, ended, at, at, at < 0, cache, memory_lengths)
    return _choose(request, state, logits, rule, rng)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def advance(
    request: Request, variables: Any, state: State, rule: Sampling | jax.Array, rng: Any, end: Any
) -> State:
    """Read the newest token and choose the next, until step `end` or all sequences have ended."""

    def step(state: State) -> State:
        logits, cache = _read(
            request, variables, state.cache, state.last[:, None],
            at=jnp.zeros_like(state.at), positions=state.at[:, None],
            memory_lengths=state.memory_lengths,
        )  # fmt: skip
        return _choose(request, state.replace(cache=cache), logits, rule, rng)

    return jax.lax.while_loop(lambda state: (state.step < end) & ~state.done.all(), step, state)


def best(request: Request, state: State) -> Generated:
    """Return the sequence of each prompt, the best candidate of a beam search."""
    if state.ended is None:
        return state.live
    return _take(state.ended, jnp.arange(0, len(state.at), request.beams))


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
    request: Request, state: State, logits: jax.Array, rule: Any, rng: jax.Array | None
) -> State:
    log_p, live = jax.nn.log_softmax(logits, axis=-1).astype(jnp.float32), state.live
    state = state.replace(step=state.step + 1, at=state.at + 1)
    if state.ended is not None:
        text: Any = ("batch", None)
        row = text[:1]
        candidates = Generated(text, row, row)
        rows, token, live, ended, done = sharding.auto(
            functools.partial(_extend, request), [row, row, candidates, candidates, row],
            log_p, live, state.ended, state.done, rule,
        )  # fmt: skip
        cache = caches.fork(state.cache, rows)
        return state.replace(live=live, ended=ended, last=token, done=done, cache=cache)
    key = None if rng is None else jax.random.fold_in(rng, state.step - 1)
    token = rule.choose(key, logits)
    token = jnp.where(state.done, request.eos[0], token) if request.eos else token
    chosen = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None] == token[:, None]
    gained = jnp.where(state.done, 0.0, jnp.sum(log_p, axis=-1, where=chosen))
    live = Generated(
        _appended(live, token), live.lengths + (~state.done).astype(jnp.int32), live.scores + gained
    )
    return state.replace(live=live, last=token, done=state.done | _ends(token, request.eos))


def _extend(
    request: Request, log_p: jax.Array, live: Generated, ended: Generated, over: jax.Array,
    length_penalty: jax.Array,
) -> list[Any]:  # fmt: skip
    """Return the parent and token of each new live candidate, and the new live, ended and over.

    log_p [R, V] are the next token's log-probabilities. A score is −∞ for a missing candidate, and
    not normalized for a live one. `over` [R] is True for a search that has ended.
    """
    beams, eos, early = request.beams, request.eos, request.early_stopping
    log_p, live, ended, over = jax.tree.map(
        lambda x: x.reshape(-1, beams, *x.shape[1:]), (log_p, live, ended, over)
    )
    V, most = log_p.shape[-1], request.max_new_tokens
    # top_k takes a NaN without a sign first. The NaN of a missing candidate must not count.
    log_p = jnp.where(jnp.isnan(log_p), jnp.nan, log_p)
    scores = live.scores[..., None]
    total = jnp.where(scores == -jnp.inf, scores, scores + log_p).reshape(-1, V)
    # Each eos may end all candidates, and then as many must remain.
    count = min((1 + max(1, len(eos))) * beams, beams * V)
    # First of each candidate: XLA:TPU takes seconds to compile a sort of one row of a vocabulary.
    total, token = (x.reshape(-1, beams * x.shape[-1]) for x in jax.lax.top_k(total, min(count, V)))
    total, flat = jax.lax.top_k(total, count)
    parents, token = flat // min(count, V), jnp.take_along_axis(token, flat, -1)
    parent = _select(live, parents)
    extended = Generated(_appended(parent, token), parent.lengths + 1, total)
    stops = _ends(token, eos) | (extended.lengths == most)

    total, order = jax.lax.top_k(jnp.where(stops, -jnp.inf, total), beams)
    parents, token, live = _select((parents, token, extended), order)
    live = live._replace(scores=total)
    # Only the first `beams` may end. The others are there to continue.
    new = jax.tree.map(lambda x: x[:, :beams], extended)

    def normalize(log_p: jax.Array, lengths: jax.Array) -> jax.Array:
        return log_p / lengths.astype(log_p.dtype) ** length_penalty

    scores = jnp.where(stops[:, :beams] & ~over, normalize(new.scores, new.lengths), -jnp.inf)
    every = jax.tree.map(lambda *x: jnp.concatenate(x, 1), ended, new._replace(scores=scores))
    ended = _select(every, jax.lax.top_k(every.scores, beams)[1])

    # A bound of live scores ends the search at the best ended one, but an estimate at the worst.
    never, worst = early == "never", ended.scores[:, -1:]
    lengths = jnp.where((length_penalty > 0) & never, most, live.lengths)
    rival = jnp.where((length_penalty <= 0) | never, ended.scores[:, :1], worst)
    over |= normalize(live.scores, lengths)[:, :1] <= rival
    over |= (worst > -jnp.inf) & (early is True)
    rows = parents + beams * jnp.arange(len(parents), dtype=jnp.int32)[:, None]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), [rows, token, live, ended, over])


def _appended(texts: Generated, token: jax.Array) -> jax.Array:
    """Return the tokens of sequences with one more."""
    places = jnp.arange(texts.tokens.shape[-1], dtype=jnp.int32)
    is_next = shapes.lead(places, texts.tokens.ndim) == texts.lengths[..., None]
    return jnp.where(is_next, token[..., None], texts.tokens)


def _ends(tokens: jax.Array, eos: tuple[int, ...]) -> jax.Array:
    return functools.reduce(lambda is_end, token: is_end | (tokens == token), eos, tokens < 0)


# Take candidates [B, n, …] at the indices [B, m] of each prompt.
_select = jax.vmap(lambda tree, index: jax.tree.map(lambda x: x[index], tree))


def _constrain(x: jax.Array) -> jax.Array:
    return sharding.constrain(x, ("batch", *[None] * (x.ndim - 1)))


def _take(tree: Any, rows: jax.Array) -> Any:
    """Take rows of arrays, sharded over the batch."""
    names = jax.tree.map(lambda x: ("batch", *[None] * (x.ndim - 1)), tree)
    return sharding.auto(
        lambda tree, rows: jax.tree.map(lambda x: jnp.take(x, rows, axis=0), tree), names, tree,
        rows,
    )  # fmt: skip
