"""gpt-oss, Mixtral and Qwen3-MoE: decoders as Llama's, with experts in place of the MLP."""

from flax_mha.interop.config import activation, refuse
from flax_mha.interop.llama import llama
from flax_mha.interop.settings import REMEDY, Config, filled
from flax_mha.interop.table import Family, TensorRule, expert, linear, per_layer
from flax_mha.models.experts import Experts

_MOST = 2**15  # of each there are rows; Qwen3-235B-A22B has 12,032
_THEIRS, _OURS = "model.layers.{}", "decoder/layers_{}"


def gpt_oss(config: Config) -> Family:
    """Return the family of `GptOssForCausalLM`, with weights in bfloat16."""
    refuse(config, swiglu_alpha=1.702, hidden_act="silu")
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation="quick_gelu", limit=config.get("swiglu_limit", 7.0), offset=1.0, use_bias=True,
    )  # fmt: skip
    at, mine = f"{_THEIRS}.mlp.experts", f"{_OURS}/mlp"
    rows = [
        TensorRule(f"{_THEIRS}.self_attn.sinks", f"{_OURS}/attention/sinks"),
        *linear(f"{_THEIRS}.mlp.router", f"{mine}/router"),
    ]
    for theirs, leaf in (("", "kernel"), ("_bias", "bias")):
        # Features of gate and up lie in turn.
        pair = (f"{mine}/gate_{leaf}", f"{mine}/up_{leaf}")
        rows.append(TensorRule(f"{at}.gate_up_proj{theirs}", pair, alternate=True))
        rows.append(TensorRule(f"{at}.down_proj{theirs}", f"{mine}/down_{leaf}"))
    layers = config["num_hidden_layers"]
    return llama(config, [experts] * layers, per_layer(layers, rows), sinks=True)


def mixtral(config: Config) -> Family:
    """Return the family of `MixtralForCausalLM`."""
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"),
    )  # fmt: skip
    return _plain(config, experts, "block_sparse_moe", {"w1": "gate", "w3": "up", "w2": "down"})


def qwen3_moe(config: Config) -> Family:
    """Return the family of `Qwen3MoeForCausalLM`; layers may have an MLP in place of experts."""
    plain, step = config.get("mlp_only_layers", ()), config.get("decoder_sparse_step", 1)
    # The one name or the other.
    local = config.get("num_local_experts")
    count = (config if local is None else filled(config, num_experts=local))["num_experts"]
    experts = Experts(
        config["moe_intermediate_size"], count, config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"), normalize=config.get("norm_topk_prob", False),
    )  # fmt: skip
    sparse = [i not in plain and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])]
    names = {f"{x}_proj": x for x in ("gate", "up", "down")}
    return _plain(config, experts, "mlp", names, sparse)


def _plain(
    config: Config, experts: Experts, part: str, names: dict[str, str],
    sparse: list[bool] | None = None,
) -> Family:  # fmt: skip
    """Return a family whose experts have a tensor for each kernel (default: in all layers)."""
    layers = config["num_hidden_layers"]
    sparse = sparse or [True] * layers
    at, mine = f"{_THEIRS}.{part}", f"{_OURS}/mlp"
    layer_rows = linear(f"{at}.gate", f"{mine}/router", bias=False)
    if layers * experts.num_experts > _MOST:
        raise ValueError(
            f"the config's layers must have at most {_MOST:,} experts in all, got "
            f"{layers:,} of {experts.num_experts:,}; {REMEDY}"
        )
    for i in range(experts.num_experts):
        layer_rows += [
            TensorRule(f"{at}.experts.{i}.{theirs}.weight", f"{mine}/{name}_kernel", expert(),
                part=(i, i + 1))
            for theirs, name in names.items()
        ]  # fmt: skip
    rows = per_layer((i for i, has in enumerate(sparse) if has), layer_rows)
    return llama(config, [experts if has else None for has in sparse], rows)
