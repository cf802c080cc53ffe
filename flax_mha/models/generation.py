"""Tokens after a prompt: read it once, then token by token from the cache."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks, shapes
from flax_mha.cache.collection import free
from flax_mha.layer.settings import check_module
from flax_mha.models import decoding
from flax_mha.models.decoding import Model, Own, Request
from flax_mha.models.embeddings import TokenEmbedding
from flax_mha.models.models import Translator
from flax_mha.models.sampling import Sampling

Callback = Callable[[int, np.ndarray], None]


class Generated(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: int32 [B, max_new_tokens]; after a row's eos, eos again (of several the first).
      lengths: int32 [B], tokens up to the eos, and with it.
      scores: float32 [B], the log-probability of those tokens by the model, whatever they were
        drawn by.
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array


def generate(
    model: Model,
    variables: Mapping[str, Any],
    prompt: jax.Array,
    *,
    max_new_tokens: int,
    lengths: jax.Array | None = None,
    start: int | Sequence[int] | None = None,
    eos: int | Sequence[int] | None = None,
    rng: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    beams: int = 1,
    capacity: int | None = None,
    callback: Callback | None = None,
    cache: Any = None,
) -> Generated:
    """Continue each prompt, or translate it, by a model as it was trained.

    The prompt is read in one call; then each step reads one token, in a compiled loop that ends
    when all rows have. Greedy unless a temperature or beams are given. Compiled once for each
    model, shape and rule; the numbers of a rule may change. On a mesh (`jax.set_mesh` and logical
    axis rules) everything is laid out as they say.

    Args:
      model: a `LanguageModel`; or a `Translator`, such as Whisper, whose prompt is the source; or
        of any other model, linen or nnx, a function step(variables, cache, tokens [B, T],
        positions [B, T]) -> (logits [B, T, V], cache), with an argument `lengths` if prompts
        differ in length. It has to be the same function in every call, or its loop is compiled
        anew.
      variables: its variables; a `cache` among them is not used. Of a step, what it takes first.
      prompt: int [B, T], ids of the vocabulary. Where they are traced, a row with others has a
        score of NaN. Of Whisper, sound [B, frames, bins].
      max_new_tokens: how many tokens at most.
      lengths: int [B], how many tokens of each prompt are real, 1 … T (default: all). The others
        may be anything.
      start: for a `Translator`, the token that a target begins with, or several; they are not
        returned.
      eos: the token that ends a row, or several, any of which does (default: none, all rows get
        max_new_tokens).
      rng: a key, which the draws are a pure function of; needed with a temperature.
      temperature: what logits are divided by before a draw; 0 takes the most likely token.
      top_k: draw from the k most likely tokens only.
      top_p: draw from the fewest tokens that have this probability together.
      beams: beam search: follow so many candidates a row, and return the one with the highest
        score, the sum of its tokens' log-probabilities.
      capacity: slots of the cache (default: as many as needed). One number for prompts of many
        lengths.
      callback: called as callback(step, tokens) with int32 [B] after each step, in order, with eos
        for rows that have ended; the loop then runs on the host.
      cache: of a step, with room for the prompt and what follows: any tree of `KVCache` and
        `Memory`, such as the collection of a linen model or the state of an nnx one.

    Returns:
      `Generated`.

    Raises:
      ValueError: if sizes or settings do not fit, before anything is compiled.
      TypeError: if a dtype is not supported.
    """
    _check_model(model, start)
    prompt, lengths, target = _check_call(model, variables, cache, prompt, lengths)
    checks.positive(max_new_tokens=max_new_tokens, beams=beams)
    sampling = Sampling.checked(temperature, top_k, top_p)
    if beams > 1 and (temperature or callback):
        raise ValueError(
            f"beams={beams} are searched, not drawn, and settled at the end only; drop temperature "
            f"and callback, or use beams=1"
        )
    if rng is not None:
        checks.key("rng", rng)
    starts, ends = _ids("start", start, target), _ids("eos", eos, target)
    if callback is not None:
        checks.function("callback", callback, "(step, tokens)", "None for none", 2)
    if temperature and rng is None:
        raise ValueError(f"temperature={temperature} needs an rng to draw with, got None")
    read = prompt.shape[1] if starts is None else len(starts)
    capacity = _check_capacity(model, read, max_new_tokens, capacity, cache)
    rules = tuple(nn.get_logical_axis_rules())
    request = Request(
        decoding.with_caches(model), max_new_tokens, capacity, starts, ends, beams, rules
    )
    weights: Any = variables
    if cache is None:
        weights = {name: value for name, value in variables.items() if name != "cache"}
    state = decoding.begin(request, weights, prompt, lengths, sampling, rng, cache)
    if callback is None:
        state = decoding.finish(request, weights, state, sampling, rng)
    else:
        callback(0, np.asarray(state.last))
        while not decoding.ended(request, state):
            state = decoding.advance(request, weights, state, sampling, rng)
            callback(int(state.step) - 1, np.asarray(state.last))
    best = functools.partial(decoding.best, request)
    return Generated(best(state.tokens), best(state.lengths), best(state.scores))


def _ids(name: str, ids: Any, vocabulary: int) -> tuple[int, ...] | None:
    """Return one token, or several, as a tuple."""
    if ids is None:
        return None
    several = ids if isinstance(ids, list | tuple) else [ids]
    if not several:
        raise ValueError(f"{name} must be a token or several, got none; None for no such token")
    return tuple(checks.integer(name, token, most=vocabulary - 1) for token in several)


def _check_model(model: Model, start: Any) -> None:
    # Loaded by whoever has a module of nnx; it is slow to import.
    nnx = sys.modules.get("flax.nnx")
    modules = (nn.Module, type) if nnx is None else (nn.Module, type, nnx.Module)
    if not isinstance(model, Own) and (isinstance(model, modules) or not callable(model)):
        raise TypeError(
            f"model must be a LanguageModel or a Translator of flax_mha.models, got "
            f"{type(model).__name__}; of another give a function step(variables, cache, tokens, "
            f"positions) -> (logits, cache), and cache=; of a ToNNX the linen module in it and its "
            f"variables"
        )
    if isinstance(model, Translator) != (start is not None):
        raise ValueError(
            f"start is the token that a Translator's target begins with, got start={start} for a "
            f"{type(model).__name__}; {'give it' if start is None else 'drop it'}"
        )
    try:
        hash(model)
    except TypeError:
        raise TypeError(
            f"model must be hashable, so that its compiled loop is found again, got {model}; "
            f"hold no arrays or lists in its fields, tuples instead"
        ) from None


def _check_call(
    model: Model, variables: Any, cache: Any, prompt: Any, lengths: Any
) -> tuple[jax.Array, jax.Array, int]:
    """Return tokens and lengths of the prompt, and the size of the vocabulary of the output."""
    if not isinstance(model, Own):
        if lengths is not None and not decoding.takes_lengths(model):
            raise ValueError(
                "lengths need a step that takes them, step(variables, cache, tokens, positions, "
                "lengths=None), and keeps no more tokens of each row in its cache"
            )
        prompt, lengths = _check_prompt(prompt, lengths, None)
        return prompt, lengths, _check_step(model, variables, cache, prompt, lengths)
    if cache is not None:
        raise ValueError(
            f"cache is for a step function, got it for a {type(model).__name__}, which makes its "
            f"own; leave it out"
        )
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"variables must be those of the model, a mapping, got {type(variables).__name__}; "
            f"give what model.init returned"
        )
    if "params" not in variables:
        raise ValueError(
            f"variables must have the collection 'params', got {sorted(variables)}; give what "
            f"model.init returned, or {{'params': params}}"
        )
    if isinstance(model, Translator) and not model.reads_tokens:
        check_module("embedding", model.decoder.embedding, TokenEmbedding)
        features, counts = _check_source(model, prompt, lengths)
        return features, counts, model.decoder.embedding.vocab_size
    translates = isinstance(model, Translator)
    target: Any = model.decoder.embedding if translates else model.embedding
    source: Any = (translates and model.embedding) or target
    for table in (source, target):
        check_module("embedding", table, TokenEmbedding)
    tokens, counts = _check_prompt(prompt, lengths, source.vocab_size)
    return tokens, counts, target.vocab_size


def _check_step(
    step: decoding.Step, variables: Any, cache: Any, prompt: jax.Array, lengths: jax.Array
) -> int:
    """Check the outputs of a step, and return the size of the vocabulary."""
    if cache is None:
        raise ValueError(
            "a step needs a cache to begin with, got None; give cache=, with room for the prompt "
            "and max_new_tokens"
        )
    call = {"lengths": lengths} if decoding.takes_lengths(step) else {}
    outputs: Any = jax.eval_shape(lambda v, c: step(v, c, prompt, prompt, **call), variables, cache)
    logits, new = outputs if isinstance(outputs, tuple) and len(outputs) == 2 else (outputs, None)
    shape: shapes.Shape = getattr(logits, "shape", ())
    if new is None or len(shape) != 3 or shape[:2] != prompt.shape:
        raise ValueError(
            f"a step must give logits [B, T, V] and the cache, got {checks.describe(logits)} for "
            f"tokens {prompt.shape}"
        )
    made: Any = jax.tree.structure(new)
    if made != jax.tree.structure(cache):
        raise ValueError(
            "a step must give a cache of the same structure as it takes; return the new cache alone"
        )
    return int(shape[2])


def _check_source(model: Translator, prompt: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    """Return a source of numbers [B, S, D], and its lengths, which are all of it."""
    prompt = checks.floating("prompt", prompt)
    if prompt.ndim != 3 or 0 in prompt.shape:
        raise ValueError(
            f"prompt must be a source [B, S, D] for a {type(model).__name__}, got shape "
            f"{prompt.shape}; give a single one as prompt[None]"
        )
    if lengths is not None:
        raise ValueError(
            f"lengths must be None for a {type(model).__name__}, which reads all of its source, "
            f"got {checks.describe(lengths)}; pad the source as it was in training"
        )
    return jnp.asarray(prompt), jnp.full(len(prompt), prompt.shape[1])


def _check_prompt(prompt: Any, lengths: Any, vocabulary: int | None) -> tuple[jax.Array, jax.Array]:
    """Return tokens int32 [B, T] and how many are real, int32 [B]."""
    prompt = checks.integers("prompt", prompt)
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(
            f"prompt must have shape [B, T] with at least one row and token, got {prompt.shape}; "
            f"give a single prompt as prompt[None]"
        )
    B, T = prompt.shape
    # There is nothing to go on from in an empty prompt.
    counts = np.full(B, T) if lengths is None else lengths
    lengths = shapes.per_row("lengths", counts, (B,), T, least=1)
    if checks.is_concrete(lengths) and checks.is_concrete(prompt):
        real = np.arange(T)[None] < np.asarray(counts)[:, None]
        remedy = "give ids of the model's embedding"
        checks.within("prompt", np.asarray(prompt)[real], vocabulary, remedy)
    return jnp.asarray(prompt), lengths


def _check_capacity(model: Model, read: int, new: int, capacity: int | None, cache: Any) -> int:
    """Return the slots of the cache: for the tokens read first, and all new ones but the last."""
    checks.optional(capacity=capacity)
    needed = read + new - 1
    if not isinstance(model, Own):
        left = free(cache)
        if checks.is_concrete(left) and int(left.min()) < needed:
            raise ValueError(
                f"the cache must have room for {needed} tokens, the prompt's {read} and "
                f"max_new_tokens={new} but one, and has it for {left.min()}; make it larger"
            )
        return needed
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"capacity must be at least {needed}, the {read} tokens read at first and "
            f"max_new_tokens={new} but one, got {capacity}; raise it, or generate fewer"
        )
    table = (model.decoder if isinstance(model, Translator) else model).position_embedding
    rows = table.max_length if table.kind == "learned" else None
    if rows is not None and rows < (capacity or needed):
        raise ValueError(
            f"the learned position table has max_length={rows} rows, and {capacity or needed} "
            f"tokens are to be read; shorten the prompt, max_new_tokens or capacity"
        )
    return capacity or needed
