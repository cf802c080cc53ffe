"""Logits of a language model, split into the parts of its residual stream.

Sources: nostalgebraist, "Interpreting GPT: the Logit Lens", 2020; Elhage et al., "A Mathematical
Framework for Transformer Circuits", 2021 (direct attribution).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha.analysis.circuits import parameters
from flax_mha.base import checks, numerics, shapes
from flax_mha.kernels import Capture
from flax_mha.models import LanguageModel
from flax_mha.taps.sown import values
from flax_mha.taps.tap import capturing

# The fields with which logits are not linear in the captured parts.
_NOT_LINEAR = {
    "logits_cap", "pre_norm", "branch_norm", "layer_scale", "output_scale", "project_out",
}  # fmt: skip


def logit_lens(model: LanguageModel, variables: Any, tokens: Any, **kwargs: Any) -> jax.Array:
    """Return logits of the residual stream before each layer and after the last, [L + 1, *B, T, V].

    They go through the final norm and the table of logits, so the last are the model's.

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

    resid = [layer["resid_pre"] for layer in layers] + [layers[-1]["resid_post"]]
    return jnp.stack([to_logits(x) for x in resid])


def attribute_logits(
    model: LanguageModel, variables: Any, tokens: Any, targets: Any, **kwargs: Any
) -> dict[str, jax.Array]:
    """Return the share of each part of a model in the logit of a token, or in a difference.

    For a fixed division by the final norm, logits are sums over the parts c of the residual stream:

        share of c = ((c − mean(c)) / σ ⊙ γ) · (u_right − u_wrong)

    where σ and γ are the norm's (an RMSNorm subtracts no mean), and u rows of the table of logits.

    Args:
      model: a linen language model that ends with a LayerNorm, an RMSNorm or no norm.
      variables: its variables.
      tokens: int [*B, T].
      targets: int [*B, T], the token of each logit; or a pair (right, wrong).
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
    table = parameters(variables, f"{'embedding' if model.tied else 'head'}/table/embedding")
    table = table.astype(shapes.wide(table.dtype)) * model.logits_scale
    pair = targets if isinstance(targets, tuple) else (targets,)
    direction, *wrong = (numerics.look_up(table, jnp.asarray(x)) for x in pair)
    direction = direction - wrong[0] if wrong else direction
    dtype, shares = direction.dtype, {}
    if norm is not None:
        if "bias" in p:
            shares["decoder/norm/bias"] = direction @ p["bias"].astype(dtype)
        if "scale" in p:
            direction = direction * shapes.lead(p["scale"].astype(dtype), direction.ndim)
        final = layers[-1]["resid_post"].astype(dtype)
        if isinstance(norm, nn.LayerNorm):
            direction, final = (x - x.mean(-1, keepdims=True) for x in (direction, final))
        square = jnp.mean(jnp.square(final), -1, keepdims=True)
        direction = direction * jax.lax.rsqrt(square + norm.epsilon)

    def share(x: jax.Array, sums: str = "...d,...d->...") -> jax.Array:
        return jnp.einsum(sums, x.astype(dtype), direction, precision=jax.lax.Precision.HIGHEST)

    shares["decoder/embed"] = share(layers[0]["resid_pre"])
    for n, layer in enumerate(layers):
        path = f"decoder/layers_{n}"
        shares[f"{path}/mlp"] = share(layer["mlp_out"])
        for name in ("attention", "cross_attention"):
            if (results := layer.get(f"{name}/attention_result")) is not None:
                shares[f"{path}/{name}"] = heads = share(results, "...nd,...d->...n")
                out = share(layer[f"{name}/attention_out"])
                shares[f"{path}/{name}/bias"] = out - heads.sum(-1)
    return shares


def _check_linear(model: LanguageModel, norm: Any) -> None:
    """Check that logits are linear in the outputs of heads and MLPs."""
    parts: list[nn.Module] = [model]
    for block in model.decoder.blocks:
        parts += [block, block.attention, getattr(block, "cross_attention", None) or block]
    got = {name for part in parts for name in checks.unhandled(part, ())} & _NOT_LINEAR
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm | None):
        got.add("a norm of another kind")
    if got:
        raise ValueError(
            f"shares in logits need residual branches that are added unchanged, and logits linear "
            f"in their sum, got a model with {' and '.join(sorted(got))}; remove heads by edits "
            f"instead, and compare outputs"
        )


def _capture(
    model: LanguageModel, variables: Any, names: tuple[str, ...], tokens: Any, kwargs: Any
) -> list[dict[str, jax.Array]]:
    """Return the captured tensors of each layer by their paths in it."""
    with capturing(Capture(names)):
        _, sown = model.apply(variables, tokens, mutable="intermediates", **kwargs)
    tensors = values(sown)

    def layer(at: tuple[str, ...], step: int | None) -> dict[str, jax.Array]:
        prefix = "/".join(("decoder", *at, ""))
        index = ... if step is None else step
        return {
            path.removeprefix(prefix): x[index] for path, x in tensors.items()
            if path.startswith(prefix)
        }  # fmt: skip

    return [layer(path, step) for path, _, step in model.decoder.places]


def _final_norm(model: LanguageModel, variables: Any) -> tuple[Any, Any]:
    """Return the final norm, or None, and its parameters."""
    block, has_norm = model.decoder.first, model.decoder.final_norm
    has_norm = not block.post_norm if has_norm is None else has_norm
    p = parameters(variables, "decoder").get("norm", {})
    return block.norm_module() if has_norm else None, p
