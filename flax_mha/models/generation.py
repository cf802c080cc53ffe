"""Text generation: read a prompt once, then generate token by token with a cache."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks, shapes
from flax_mha.base.arguments import names_of
from flax_mha.cache.collection import free
from flax_mha.layer.settings import check_module
from flax_mha.models import decoding
from flax_mha.models.attention_mask import move_to_front
from flax_mha.models.beams import BeamSearch, Generated
from flax_mha.models.decoding import Model, Own, Request
from flax_mha.models.embeddings import TokenEmbedding
from flax_mha.models.models import Translator
from flax_mha.sampling import Sampling


def generate(
    model: Model, variables: Mapping[str, Any], prompt: jax.Array, *, max_new_tokens: int,
    lengths: jax.Array | None = None, attention_mask: jax.Array | None = None,
    start: int | Sequence[int] | None = None, eos: int | Sequence[int] | None = None,
    rng: jax.Array | None = None, temperature: float = 0.0, top_k: int | None = None,
    top_p: float | None = None, min_p: float | None = None, beams: int = 1,
    length_penalty: float = 0.0, early_stopping: bool | str = False, capacity: int | None = None,
    callback: Callable[[int, np.ndarray], None] | None = None, cache: Any = None,
) -> Generated:  # fmt: skip
    """Generate tokens that continue or translate each prompt.

    The prompt is read in one call; then each step reads one token, in a compiled loop that ends
    when all sequences have ended. Tokens are chosen greedily unless a temperature or beams are
    given. The loop is compiled once for each model, shape and combination of options; numbers
    such as the temperature may change. On a mesh, arrays follow the logical axis rules.

    Args:
      model: a `LanguageModel`, or a `Translator` such as Whisper, whose prompt is the source. For
        any other linen or nnx model, pass a function step(variables, cache, tokens [B, T],
        positions [B, T]) -> (logits [B, T, V], cache), with an argument `lengths` if prompts
        differ in length. Reuse the same function, or each call compiles a new loop.
      variables: the model's variables, without its cache; or the first argument of the step.
      prompt: int [B, T], token ids. If they are traced, an id out of range makes its score NaN. For
        Whisper, spectrograms [B, frames, bins].
      max_new_tokens: the maximum number of new tokens.
      lengths: int [B], the number of real tokens of each prompt, 1 … T (default: all). The others
        may have any value.
      attention_mask: bool or int [B, T] in place of `lengths`, as tokenizers give it: 0 for
        padding, on either side or between tokens (not between those of a `Translator`). Positions
        and windows count the tokens alone.
      start: one or several tokens that a `Translator`'s target begins with; they are not returned.
      eos: one or several tokens that end a sequence (default: none).
      rng: the random key; required with a temperature.
      temperature: the divisor of logits before a draw; 0 takes the most likely token.
      top_k: the number of most likely tokens to draw from (default: all).
      top_p: the total probability of the most likely tokens to draw from (default: all).
      min_p: the least probability to draw, as a share of the highest one (default: 0).
      beams: the number of candidates of a beam search. It returns the ended one with the highest
        score, log-probability / length ** length_penalty. The length counts new tokens.
      length_penalty: a number; above 0 it favors longer sequences. (Its default in `transformers`
        is 1.)
      early_stopping: the rule that ends a beam search, as in `transformers`. True: as soon as
        `beams` candidates have ended. False: when no live one scores higher than the worst of
        these, at its present length. "never": when none could at any length.
      capacity: the number of cache slots (default: as many as needed). A fixed number serves
        prompts of several lengths.
      callback: a function callback(step, tokens), called after each step with int32 [B], which are
        eos for sequences that have ended. The loop then runs on the host.
      cache: a step's cache, with room for the prompt and the new tokens: a tree of `KVCache`,
        such as the collection of a linen model or the state of an nnx one.

    Raises:
      ValueError: if sizes or settings do not fit; raised before compilation.
      TypeError: if a dtype is not supported.
    """
    _check_model(model, start)
    prompt, lengths, target = _check_call(model, variables, cache, prompt, lengths, attention_mask)
    checks.positive(max_new_tokens=max_new_tokens, beams=beams)
    sampling = Sampling.checked(temperature, top_k, top_p, min_p)
    search = BeamSearch.checked(length_penalty, early_stopping, max_new_tokens)
    rule = search if beams > 1 else sampling
    if beams > 1 and (temperature or callback):
        raise ValueError(
            f"temperature and callback must be left out with beams={beams}, whose tokens are not "
            f"drawn, and change until the end; drop them, or use beams=1"
        )
    if beams == 1 and (length_penalty or early_stopping):
        raise ValueError(
            f"length_penalty and early_stopping must be left out with beams=1, got "
            f"{length_penalty} and {early_stopping}; give more beams, or drop them"
        )
    if rng is not None:
        checks.key("rng", rng)
    starts, ends = _ids("start", start, target), _ids("eos", eos, target)
    if temperature and rng is None:
        raise ValueError(
            f"rng must be a random key with temperature={temperature}, got None; give one"
        )
    read = prompt.shape[1] if starts is None else len(starts)
    capacity = _check_capacity(model, read, max_new_tokens, capacity, cache)
    rules = tuple(nn.get_logical_axis_rules())
    request = Request(
        decoding.with_caches(model), max_new_tokens, capacity, starts, ends, beams, rules
    )
    weights: Any = variables
    if cache is None:
        weights = {name: value for name, value in variables.items() if name != "cache"}
    state = decoding.begin(request, weights, prompt, lengths, rule, rng, cache)
    if callback is None:
        state = decoding.finish(request, weights, state, rule, rng)
    else:
        callback(0, np.asarray(state.last))
        while not decoding.ended(request, state):
            state = decoding.advance(request, weights, state, rule, rng)
            callback(int(state.step) - 1, np.asarray(state.last))
    return decoding.best(request, state.results)


def _ids(name: str, ids: Any, vocabulary: int) -> tuple[int, ...] | None:
    """Check one or several token ids, and return them as a tuple."""
    if ids is None:
        return None
    tokens = ids if isinstance(ids, list | tuple) else [ids]
    if not tokens:
        raise ValueError(f"{name} must be a token or several, got none; give None for no token")
    return tuple(checks.integer(name, token, most=vocabulary - 1) for token in tokens)


def _check_model(model: Model, start: Any) -> None:
    # Do not import nnx, which is slow; a user with an nnx module has imported it.
    modules = (nn.Module, type, getattr(sys.modules.get("flax.nnx"), "Module", type))
    if not isinstance(model, Own) and (isinstance(model, modules) or not callable(model)):
        raise TypeError(
            f"model must be a LanguageModel or a Translator of flax_mha.models, got "
            f"{type(model).__name__}; for another model give a function step(variables, cache, "
            f"tokens, positions) -> (logits, cache), and cache=; for a ToNNX give its linen module "
            f"and variables"
        )
    if isinstance(model, Translator) != (start is not None):
        raise ValueError(
            f"start must be given for a Translator, and for no other model, got start={start} for "
            f"a {type(model).__name__}; {'give it' if start is None else 'drop it'}"
        )
    try:
        hash(model)
    except TypeError:
        raise TypeError(
            f"model must be hashable, as its compiled loop is cached, got {model}; use tuples in "
            f"its fields instead of arrays and lists"
        ) from None


def _check_call(
    model: Model, variables: Any, cache: Any, prompt: Any, lengths: Any, attention_mask: Any
) -> tuple[jax.Array, jax.Array, int]:
    """Return the prompt's tokens and lengths, and the size of the output's vocabulary."""
    if attention_mask is not None:
        if lengths is not None or not getattr(model, "reads_tokens", True):
            rule = "with lengths" if lengths is not None else f"for a {type(model).__name__}"
            raise ValueError(
                f"attention_mask must be None {rule}, got {checks.describe(attention_mask)}; leave "
                f"it out"
            )
        prompt = _check_shape(prompt)
        prompt, lengths = move_to_front(prompt, attention_mask, not isinstance(model, Translator))
        if checks.is_concrete(lengths) and (lengths == prompt.shape[1]).all():
            lengths = None
    if not isinstance(model, Own):
        if lengths is not None and "lengths" not in names_of(model):
            raise ValueError(
                "lengths must be None for a step without that argument, got an array; define "
                "step(variables, cache, tokens, positions, lengths=None), which caches that many "
                "tokens of each prompt"
            )
        prompt, lengths = _check_prompt(prompt, lengths, None)
        return prompt, lengths, _check_step(model, variables, cache, prompt, lengths)
    if cache is not None:
        raise ValueError(
            f"cache must be None for a {type(model).__name__}, which creates one, got "
            f"{type(cache).__name__}; leave it out"
        )
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"variables must be the model's, a mapping, got {type(variables).__name__}; give the "
            f"result of model.init"
        )
    if "params" not in variables:
        raise ValueError(
            f"variables must have the collection 'params', got {sorted(variables)}; give the "
            f"result of model.init, or {{'params': params}}"
        )
    target: Any = (model.decoder if isinstance(model, Translator) else model).embedding
    source: Any = model.embedding or target
    for table in (source, target):
        check_module("embedding", table, TokenEmbedding)
    if isinstance(model, Translator) and not model.reads_tokens:
        prompt, lengths = _check_source(model, prompt, lengths)
    else:
        prompt, lengths = _check_prompt(prompt, lengths, source.vocab_size)
    return prompt, lengths, target.vocab_size


def _check_step(
    step: decoding.Step, variables: Any, cache: Any, prompt: jax.Array, lengths: jax.Array
) -> int:
    """Check the outputs of a step, and return the size of the vocabulary."""
    if cache is None:
        raise ValueError(
            "cache must be given for a step, got None; give one with room for the prompt and "
            "max_new_tokens"
        )
    call = {"lengths": lengths} if "lengths" in names_of(step) else {}
    outputs: Any = jax.eval_shape(lambda v, c: step(v, c, prompt, prompt, **call), variables, cache)
    logits, new = outputs if isinstance(outputs, tuple) and len(outputs) == 2 else (outputs, None)
    shape: shapes.Shape = getattr(logits, "shape", ())
    if new is None or len(shape) != 3 or shape[:2] != prompt.shape:
        raise ValueError(
            f"a step must return logits [B, T, V] and the cache, got {checks.describe(logits)} for "
            f"tokens {prompt.shape}; return both"
        )
    structure: Any = jax.tree.structure(new)
    if structure != jax.tree.structure(cache):
        raise ValueError(
            "a step must return a cache of the same structure as the given one; return the new "
            "cache alone"
        )
    return int(shape[2])


def _check_source(model: Translator, prompt: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    """Check a source of features [B, S, D], and return it with its full lengths."""
    prompt = checks.floating("prompt", prompt)
    if prompt.ndim != 3 or 0 in prompt.shape:
        raise ValueError(
            f"prompt must be a source [B, S, D] for a {type(model).__name__}, got shape "
            f"{prompt.shape}; give a single one as prompt[None]"
        )
    if lengths is not None:
        raise ValueError(
            f"lengths must be None for a {type(model).__name__}, which reads its full source, got "
            f"{checks.describe(lengths)}; pad the source as in training"
        )
    return jnp.asarray(prompt), jnp.full(len(prompt), prompt.shape[1], jnp.int32)


def _check_prompt(prompt: Any, lengths: Any, vocabulary: int | None) -> tuple[jax.Array, jax.Array]:
    """Check a prompt, and return its tokens int32 [B, T] and lengths int32 [B]."""
    prompt = _check_shape(prompt)
    B, T = prompt.shape
    # A prompt of length 0 has no last token to continue from.
    counts = np.full(B, T) if lengths is None else lengths
    lengths = shapes.per_row("lengths", counts, (B,), T, least=1)
    if checks.is_concrete(lengths) and checks.is_concrete(prompt):
        real = np.arange(T)[None] < np.asarray(counts)[:, None]
        remedy = "give ids of the model's embedding"
        checks.within("prompt", np.asarray(prompt)[real], vocabulary, remedy)
    return jnp.asarray(prompt, jnp.int32), lengths


def _check_shape(prompt: Any) -> Any:
    """Check that a prompt is integers [B, T], and return it."""
    prompt = checks.integers("prompt", prompt)
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(
            f"prompt must have shape [B, T] with at least one row and token, got {prompt.shape}; "
            f"give a single prompt as prompt[None]"
        )
    return prompt


def _check_capacity(model: Model, read: int, new: int, capacity: int | None, cache: Any) -> int:
    """Return the number of cache slots, for the tokens read first and all but the last new one."""
    checks.optional(capacity=capacity)
    needed = read + new - 1
    if not isinstance(model, Own):
        left = free(cache)
        if checks.is_concrete(left) and int(left.min()) < needed:
            raise ValueError(
                f"cache must have room for {needed} tokens, the prompt's {read} and all but one "
                f"of max_new_tokens={new}, got {left.min()}; enlarge it"
            )
        return needed
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"capacity must be at least {needed}, the {read} tokens read at first and all but one "
            f"of max_new_tokens={new}, got {capacity}; raise it, or generate fewer"
        )
    table = (model.decoder if isinstance(model, Translator) else model).position_embedding
    rows = table.max_length if table.kind == "learned" else None
    if rows is not None and rows < (capacity or needed):
        raise ValueError(
            f"prompt and new tokens must fit max_length={rows} of the learned position table, got "
            f"{capacity or needed}; shorten the prompt, max_new_tokens or capacity"
        )
    return capacity or needed
