"""Modules of experts, the methods that compute them, and their gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import Experts
from flax_mha.models import exchange, experts
from tests.support.meshes import BACKWARD, FORWARD
from tests.support.oracle import error

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8, 16)), jnp.float32)
PLAIN = Experts(24, 8, 2)
# Every option, as in gpt-oss, and a limit that many features reach.
CLIPPED = Experts(
    24, 8, 3, activation="quick_gelu", limit=0.5, offset=1.0, use_bias=True, normalize=True
)
# As in DeepSeek-V3.
GROUPED = Experts(24, 8, 3, routing="sigmoid", choice_bias=True, groups=4, top_groups=2,
                  factor=2.5, shared=20)  # fmt: skip
KINDS_OF = {"plain": PLAIN, "clipped": CLIPPED, "as they are": PLAIN.clone(normalize=False),
            "all": PLAIN.clone(top_k=8), "one": Experts(24, 1, 1), "grouped": GROUPED}  # fmt: skip
METHODS = {"in turn": {"cpu": experts.expert_by_expert}, "by rows": {}, "sent": {}}


def use(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute experts with this method, whichever the platform would choose."""
    monkeypatch.setattr(experts, "METHODS", METHODS[method])
    if method == "sent":
        monkeypatch.setattr(exchange, "SENDING", ("cpu",))
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)


def ragged_all_to_all(
    operand: Any, output: Any, input_offsets: Any, send_sizes: Any, output_offsets: Any,
    recv_sizes: Any, *, axis_name: Any,
) -> Any:  # fmt: skip
    """Do what `jax.lax.ragged_all_to_all` does, which XLA lacks on CPUs."""
    arrays = (operand, input_offsets, send_sizes, output_offsets)
    operands, inputs, sizes, outputs = (jax.lax.all_gather(x, axis_name) for x in arrays)
    me, at = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    begin, size = outputs[:, me], sizes[:, me]
    is_from = (at[:, None] >= begin[None]) & (at[:, None] < (begin + size)[None])
    sender = jnp.argmax(is_from, 1)
    rows = operands[sender, inputs[sender, me] + at - begin[sender]]
    rows = jnp.where(is_from.any(1)[:, None], rows, output)
    return jnp.where(jnp.all(size == recv_sizes), rows, jnp.nan)


def run(module: Experts, params: Any, x: Any) -> tuple[Any, Any]:
    """Return the gradients and the output."""

    def loss(params: Any, x: Any) -> Any:
        y = module.apply(params, x)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)


def choose(module: Experts, params: Any, p: np.ndarray) -> np.ndarray:
    """Return the experts of a token whose probabilities are p [E]."""
    choice = p + np.asarray(params.get("choice_bias", 0), np.float64)
    groups = np.split(choice, module.groups)
    best = np.argsort([-np.sort(group)[-2:].sum() for group in groups])
    barred = best[module.groups if module.top_groups is None else module.top_groups :]
    size = len(p) // module.groups
    for i in barred:
        choice[i * size : (i + 1) * size] = -np.inf
    return np.argsort(-choice)[: module.top_k]


def balance(logits: Any, top_k: int) -> tuple[float, np.ndarray]:
    """Return the balance loss of logits [n, E], and its gradient, in float64."""
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(-1, keepdims=True)
    n, E = p.shape
    chosen = np.zeros(E)
    for row in p:
        chosen[np.argsort(-row)[:top_k]] += 1 / (n * top_k)
    gradient = E / n * p * (chosen - (p * chosen).sum(-1, keepdims=True))
    return float(E * np.sum(chosen * p.mean(0))), gradient


def check_balance(module: Experts, params: Any, x: Any, router: Any) -> None:
    """Check the sown logits and the loss, with its gradient for the router."""

    def loss(params: Any, x: Any) -> Any:
        _, state = module.apply(params, x, mutable=["intermediates"])
        return state["intermediates"]["balance_loss"][0], state["intermediates"]

    of_params, found = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params, x))
    wide = np.asarray(X, np.float64).reshape(-1, 16)
    logits = wide @ router["kernel"] + router.get("bias", 0)
    wanted, gradient = balance(logits, module.top_k)
    assert error(found["router_logits"][0].reshape(logits.shape), logits) < FORWARD
    assert abs(found["balance_loss"][0] - wanted) < 1e-6
    assert error(of_params["params"]["router"]["kernel"], wide.T @ gradient) < BACKWARD
