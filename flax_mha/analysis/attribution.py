"""Logits of a language model, split into the parts of its residual stream.

Sources: nostalgebraist, "Interpreting GPT: the Logit Lens", 2020; Elhage et al., "A Mathematical
Framework for Transformer Circuits", 2021 (direct attribution).
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha.analysis.circuits import parameters
from flax_mha.base import checks, numerics, shapes
from flax_mha.kernels import Capture
from flax_mha.models import LanguageModel
from flax_mha.taps.contexts import looking

# The fields with which logits are linear in the captured parts.
_MODEL = (
    "embedding", "decoder", "tied", "position_embedding", "dropout_rate", "logits_scale",
)  # fmt: skip
_STACK = ("num_layers", "block", "scan", "scores", "input_norm", "final_norm", "kv_from")
_BLOCK = (
    "attention", "cross_attention", "mlp_dim", "norm", "pre_norm", "activation", "gated",
    "dropout_rate", "remat", "norm_epsilon", "mlp_bias", "parallel", "mlp",
)  # fmt: skip


def logit_lens(model: LanguageModel, variables: Any, tokens: Any, **kwargs: Any) -> jax.Array:
    """Return the logits of the residual stream before each layer and after the last.

    They are [L + 1, *B, T, V], through the final norm and the table of logits. The last are the
    model's logits.

    Args:
      model: a linen language model.
      variables: its variables.
      tokens: int [*B, T].
      **kwargs: more arguments of the call.
    """
    layers = _capture(model, variables, ("resid_pre", "resid_post"), tokens, kwargs)
    norm, p = _final_norm(model, variables)

    def to_logits(x: Any) -> Any:
        x = x if norm is None else norm.apply({"params": p}, x)
        return model.apply(variables, x, method="to_logits")

    resid = [layer["resid_pre"][0] for layer in layers] + [layers[-1]["resid_post"][0]]
    return jnp.stack([to_logits(x) for x in resid])


def attribute_logits(
    model: LanguageModel, variables: Any, tokens: Any, targets: Any, **kwargs: Any
) -> dict[str, jax.Array]:
    """Return the share of each part of a model in the logit of a token, or in a difference.

    With the final norm's division kept as it is in this call, logits are linear in the parts c of
    the residual stream, so the shares sum to the logit:

        share of c = ((c − mean(c)) / σ ⊙ γ) · (u_right − u_wrong)

    where σ and γ are the norm's (an RMSNorm subtracts no mean), and u rows of the table of logits.

    Args:
      model: a linen language model that ends with a LayerNorm, an RMSNorm or no norm.
      variables: its variables.
      tokens: int [*B, T].
      targets: int [*B, T], the token of each logit; or a pair (right, wrong), for the difference
        of their logits.
      **kwargs: more arguments of the call.

    Returns:
      Shares [*B, T] by path: "decoder/embed", "decoder/norm/bias", "…/mlp" of each layer,
      "…/attention" [*B, T, N] and "…/attention/bias"; the same for cross-attention.

    Raises:
      ValueError: if logits are not linear in these parts, as with a cap or norms of branches.
    """
    names = ("result", "out", "mlp_out", "resid_pre", "resid_post")
    layers = _capture(model, variables, names, tokens, kwargs)
    norm, p = _final_norm(model, variables)
    _check_linear(model, norm)
    direction = _direction(model, variables, targets)
    dtype, shares = direction.dtype, {}
    if norm is not None:
        if "bias" in p:
            shares["decoder/norm/bias"] = direction @ p["bias"].astype(dtype)
        if "scale" in p:
            direction = direction * shapes.lead(p["scale"].astype(dtype), direction.ndim)
        final = layers[-1]["resid_post"][0].astype(dtype)
        if isinstance(norm, nn.LayerNorm):
            direction, final = (x - x.mean(-1, keepdims=True) for x in (direction, final))
        square = jnp.mean(jnp.square(final), -1, keepdims=True)
        direction = direction * jax.lax.rsqrt(square + norm.epsilon)

    def share(x: jax.Array, sums: str = "...d,...d->...") -> jax.Array:
        return jnp.einsum(sums, x.astype(dtype), direction, precision=jax.lax.Precision.HIGHEST)

    shares["decoder/embed"] = share(layers[0]["resid_pre"][0])
    for n, layer in enumerate(layers):
        path = f"decoder/layers_{n}"
        shares[f"{path}/mlp"] = share(layer["mlp_out"][0])
        for name in ("attention", "cross_attention"):
            if name in layer:
                results, out = (layer[name][f"attention_{x}"][0] for x in ("result", "out"))
                shares[f"{path}/{name}"] = heads = share(results, "...nd,...d->...n")
                shares[f"{path}/{name}/bias"] = share(out) - heads.sum(-1)
    return shares


def _direction(model: LanguageModel, variables: Any, targets: Any) -> jax.Array:
    """Return the targets' rows [*B, T, D] of the table of logits."""
    name = "embedding" if model.tied else "head"
    table = parameters(variables, f"{name}/table/embedding")
    table = table.astype(shapes.wide(table.dtype)) * model.logits_scale
    pair = targets if isinstance(targets, tuple) else (targets,)
    right, *wrong = (numerics.look_up(table, jnp.asarray(x)) for x in pair)
    return right - wrong[0] if wrong else right


def _check_linear(model: LanguageModel, norm: Any) -> None:
    """Check that logits are linear in the outputs of heads and MLPs."""
    got = {*checks.unhandled(model, _MODEL), *checks.unhandled(model.decoder, _STACK)}
    for block in model.decoder.blocks:
        got |= checks.unhandled(block, _BLOCK).keys()
        layers = (block.attention, getattr(block, "cross_attention", None))
        got |= {"project_out"} if any(x and not x.project_out for x in layers) else set()
        got |= {"norms after the sum (pre_norm)"} if block.post_norm else set()
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm | None):
        got |= {"a norm of another kind"}
    if got:
        raise ValueError(
            f"shares in logits need residual branches that are added unchanged, and logits linear "
            f"in their sum, got a model with {' and '.join(sorted(got))}; remove heads by edits "
            f"instead, and compare outputs"
        )


def _capture(
    model: LanguageModel, variables: Any, names: tuple[str, ...], tokens: Any, kwargs: Any
) -> list[Any]:
    """Return the captured tensors of each layer."""
    if not isinstance(model, LanguageModel):
        raise TypeError(
            f"model must be a flax_mha.LanguageModel, got {type(model).__name__}; give the decoder "
            f"of an encoder-decoder model"
        )
    with looking(capture=Capture(names)):
        _, sown = model.apply(variables, tokens, mutable="intermediates", **kwargs)

    def layer(path: tuple[str, ...], step: int | None) -> Any:
        path = ("intermediates", "decoder", *path)
        values = functools.reduce(lambda tree, name: tree[name], path, sown)
        return values if step is None else jax.tree.map(lambda x: x[step], values)

    return [layer(path, step) for path, _, step in model.decoder.places]


def _final_norm(model: LanguageModel, variables: Any) -> tuple[Any, Any]:
    """Return the final norm, or None, and its parameters."""
    block, has_norm = model.decoder.first, model.decoder.final_norm
    has_norm = not block.post_norm if has_norm is None else has_norm
    p = parameters(variables, "decoder").get("norm", {})
    return block.norm_module() if has_norm else None, p
