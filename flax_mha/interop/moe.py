"""gpt-oss, Mixtral and Qwen3-MoE: decoders as Llama's, with experts in place of the MLP."""

from flax_mha.interop.config import activation, refuse
from flax_mha.interop.llama import llama
from flax_mha.interop.settings import REMEDY, Config, filled
from flax_mha.interop.table import Family, Row, each, linear, one_of_many
from flax_mha.models.experts import Experts

_MOST = 2**15  # of each there are rows; Qwen3-235B-A22B has 12,032
_THEIRS, _OURS = "model.layers.{}", "decoder/layers_{}"


def gpt_oss(config: Config) -> Family:
    """Of `GptOssForCausalLM`, with weights in bfloat16."""
    refuse(config, swiglu_alpha=1.702, hidden_act="silu")
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation="quick_gelu", limit=config.get("swiglu_limit", 7.0), offset=1.0, use_bias=True,
    )  # fmt: skip
    at, mine = f"{_THEIRS}.mlp.experts", f"{_OURS}/mlp"
    own = [
        Row(f"{_THEIRS}.self_attn.sinks", f"{_OURS}/attention/sinks"),
        *linear(f"{_THEIRS}.mlp.router", f"{mine}/router"),
    ]
    for theirs, leaf in (("", "kernel"), ("_bias", "bias")):
        # Features of gate and up lie in turn.
        pair = (f"{mine}/gate_{leaf}", f"{mine}/up_{leaf}")
        own.append(Row(f"{at}.gate_up_proj{theirs}", pair, alternate=True))
        own.append(Row(f"{at}.down_proj{theirs}", f"{mine}/down_{leaf}"))
    layers = config["num_hidden_layers"]
    return llama(config, [experts] * layers, each(layers, own), sinks=True)


def mixtral(config: Config) -> Family:
    """Of `MixtralForCausalLM`."""
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
    """Experts whose kernels lie in a tensor each, in those layers (default: in all)."""
    layers = config["num_hidden_layers"]
    sparse = sparse or [True] * layers
    at, mine = f"{_THEIRS}.{part}", f"{_OURS}/mlp"
    own = linear(f"{at}.gate", f"{mine}/router", bias=False)
    if layers * experts.num_experts > _MOST:
        raise ValueError(
            f"the config's layers must have at most {_MOST:,} experts in all, got "
            f"{layers:,} of {experts.num_experts:,}; {REMEDY}"
        )
    for i in range(experts.num_experts):
        own += [
            Row(f"{at}.experts.{i}.{theirs}.weight", f"{mine}/{name}_kernel", one_of_many(),
                part=(i, i + 1))
            for theirs, name in names.items()
        ]  # fmt: skip
    rows = each((i for i, has in enumerate(sparse) if has), own)
    return llama(config, [experts if has else None for has in sparse], rows)
