"""Text generation: read a prompt once, then generate token by token with a cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks, shapes
from flax_mha.base.arguments import names_of
from flax_mha.cache.collection import free
from flax_mha.models import decoding
from flax_mha.models.attention_mask import move_to_front
from flax_mha.models.decoding import Generated as Generated
from flax_mha.models.decoding import Model, Own, Request
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
    when all sequences have ended. Without a temperature or beams, tokens are chosen greedily. The
    loop is compiled once for each model, shape and combination of options, not for each number.

    Args:
      model: a `LanguageModel`, or a `Translator` such as Whisper, whose prompt is the source. For
        any other model, a function step(variables, cache, tokens [B, T], positions [B, T]) ->
        (logits [B, T, V], cache), with an argument `lengths` if prompts differ in length. Reuse
        the same function, or each call compiles a new loop.
      variables: the model's variables, without its cache; or the first argument of the step.
      prompt: int [B, T], token ids. A traced id out of range makes its score NaN. For Whisper,
        spectrograms [B, frames, bins].
      max_new_tokens: the maximum number of new tokens.
      lengths: int [B], the number of real tokens of each prompt, 1 … T (default: all).
      attention_mask: bool or int [B, T] in place of `lengths`, as tokenizers give it: 0 for
        padding, on either side or between tokens (not between those of T5). Positions and windows
        count only the tokens.
      start: one or several tokens that a `Translator`'s target begins with; they are not returned.
      eos: one or several tokens that end a sequence (default: none).
      rng: the random key; required with a temperature.
      temperature: the divisor of logits before a draw; 0 takes the most likely token.
      top_k: the number of most likely tokens to draw from (default: all).
      top_p: the total probability of the tokens to draw from (default: 1).
      min_p: the least probability to draw, as a share of the highest one (default: 0).
      beams: the number of candidates of a beam search. It returns the ended one with the highest
        score, log-probability / length ** length_penalty. The length counts new tokens.
      length_penalty: a number; above 0 it favors longer sequences (default in `transformers`: 1).
      early_stopping: the rule that ends a beam search. True: as soon as `beams` candidates have
        ended. False: when no live one scores higher than the worst of these, at its present
        length. "never": when none could at any length.
      capacity: the number of cache slots (default: as many as needed).
      callback: a function callback(step, tokens), called after each step with int32 [B], eos for
        sequences that have ended. The loop then runs on the host.
      cache: a step's cache, a tree of `KVCache` with room for the prompt and the new tokens.

    Raises:
      ValueError: if sizes or settings do not fit; raised before compilation.
    """
    kind = type(model).__name__
    if (cache is None) != isinstance(model, Own):
        raise ValueError(
            f"model must be a LanguageModel or a Translator of flax_mha.models without cache=, or "
            f"a function step(variables, cache, tokens, positions) -> (logits, cache) with it, got "
            f"{kind} and a cache of {type(cache).__name__}"
        )
    if isinstance(model, Translator) != (start is not None):
        raise ValueError(
            f"start must be given for a Translator, and for no other model, got start={start} for "
            f"a {kind}; {'give it' if start is None else 'drop it'}"
        )
    inner: Any = model.decoder if isinstance(model, Translator) else model
    vocabulary = inner.embedding.vocab_size if isinstance(model, Own) else None
    prompt, lengths = _check_prompt(model, prompt, lengths, attention_mask, vocabulary)
    starts, ends = _ids("start", start, vocabulary), _ids("eos", eos, vocabulary)
    checks.positive(max_new_tokens=max_new_tokens, beams=beams)
    rule: Any = Sampling.checked(temperature, top_k, top_p, min_p)
    if temperature:
        checks.key("rng", rng)
    unused: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    if beams > 1:
        if repr(early_stopping) not in ("False", "True", "'never'"):
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {early_stopping!r}"
            )
        rule = jnp.float32(checks.number("length_penalty", length_penalty))
        unused = {"temperature": temperature, "callback": callback}
    if any(unused.values()):
        raise ValueError(
            f"{' and '.join(unused)} must be left out with beams={beams}, got {unused}"
        )
    read = prompt.shape[1] if start is None else len(starts)
    checks.optional(capacity=capacity)
    # Cache slots for the tokens read first and all but the last new one.
    needed = read + max_new_tokens - 1
    slots: Any = needed if capacity is None else capacity
    if cache is not None:
        left = free(cache)
        slots = int(left.min()) if checks.is_concrete(left) else needed
    if slots < needed:
        raise ValueError(
            f"{'capacity' if cache is None else 'cache'} must have room for {needed} tokens, the "
            f"{read} read first and all but one of max_new_tokens={max_new_tokens}, got {slots}; "
            f"enlarge it, or generate fewer"
        )
    request = Request(
        decoding.with_caches(model), max_new_tokens, slots if cache is None else needed, starts,
        ends, beams, early_stopping, tuple(nn.get_logical_axis_rules()),
    )  # fmt: skip
    weights: Any = variables
    if cache is None:
        weights = {name: value for name, value in dict(variables).items() if name != "cache"}
    state = decoding.begin(request, weights, prompt, lengths, rule, rng, cache)
    if callback is None:
        state = decoding.advance(request, weights, state, rule, rng, max_new_tokens)
    else:
        callback(0, np.asarray(state.last))
        while state.step < max_new_tokens and not state.done.all():
            state = decoding.advance(request, weights, state, rule, rng, state.step + 1)
            callback(int(state.step) - 1, np.asarray(state.last))
    return decoding.best(request, state)


def _ids(name: str, ids: Any, vocabulary: int | None) -> tuple[int, ...]:
    several = ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
    tokens = tuple(checks.integer(name, token) for token in several)
    checks.within(name, np.array(tokens), vocabulary, "give ids of the model's embedding")
    return tokens


def _check_prompt(
    model: Model, prompt: Any, lengths: Any, attention_mask: Any, vocabulary: int | None
) -> tuple[jax.Array, jax.Array]:
    """Check a prompt, and return it, [B, T] or [B, S, D], and the lengths int32 [B]."""
    reads_tokens = getattr(model, "reads_tokens", True)
    prompt = (checks.integers if reads_tokens else checks.floating)("prompt", prompt)
    if prompt.ndim != (2 if reads_tokens else 3) or 0 in prompt.shape:
        raise ValueError(
            f"prompt must have shape {'[B, T]' if reads_tokens else '[B, S, D]'} with at least one "
            f"row and token, got {prompt.shape}; give a single prompt as prompt[None]"
        )
    takes_lengths = reads_tokens if isinstance(model, Own) else "lengths" in names_of(model)
    if (lengths is not None) + (attention_mask is not None) > takes_lengths:
        raise ValueError(
            f"give at most one of lengths and attention_mask, and none to Whisper or a step "
            f"without an argument `lengths`, got more for a {type(model).__name__}"
        )
    if attention_mask is not None:
        has_scores = isinstance(model, Translator) and bool(model.encoder.scores)
        prompt, lengths = move_to_front(prompt, attention_mask, not has_scores)
    B, T = prompt.shape[:2]
    # A prompt of length 0 has no last token to continue from.
    counts = np.full(B, T) if lengths is None else lengths
    lengths = shapes.per_row("lengths", counts, (B,), T, least=1)
    if reads_tokens and checks.is_concrete(lengths) and checks.is_concrete(prompt):
        real = np.arange(T)[None] < np.asarray(counts)[:, None]
        remedy = "give ids of the model's embedding"
        checks.within("prompt", np.asarray(prompt)[real], vocabulary, remedy)
    return jnp.asarray(prompt), lengths
