"""gpt-oss, Mixtral and Qwen3-MoE: decoders as Llama's, with experts in place of the MLP."""

from flax_mha.experts import Experts
from flax_mha.interop.config import activation, refuse
from flax_mha.interop.llama import llama
from flax_mha.interop.settings import REMEDY, Config
from flax_mha.interop.table import Family, Row, linear, one_of_many

_MOST = 2**15  # of each there are rows; Qwen3-235B-A22B has 12,032
_THEIRS, _OURS = "model.layers.{}", "decoder/layers_{}"


def gpt_oss(config: Config) -> Family:
    """Of `GptOssForCausalLM`, with weights in bfloat16."""
    refuse(config, swiglu_alpha=1.702)
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
    return llama(config, experts, own, sinks=True)


def mixtral(config: Config) -> Family:
    """Of `MixtralForCausalLM`."""
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"),
    )  # fmt: skip
    return _plain(config, experts, "block_sparse_moe", {"w1": "gate", "w3": "up", "w2": "down"})


def qwen3_moe(config: Config) -> Family:
    """Of `Qwen3MoeForCausalLM` whose layers all have experts."""
    refuse(config, decoder_sparse_step=1, mlp_only_layers=[])
    count = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    experts = Experts(
        config["moe_intermediate_size"], count, config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"), normalize=config.get("norm_topk_prob", False),
    )  # fmt: skip
    return _plain(config, experts, "mlp", {f"{x}_proj": x for x in ("gate", "up", "down")})


def _plain(config: Config, experts: Experts, part: str, names: dict[str, str]) -> Family:
    """Experts whose kernels lie in a tensor each."""
    at, mine = f"{_THEIRS}.{part}", f"{_OURS}/mlp"
    own = linear(f"{at}.gate", f"{mine}/router", bias=False)
    if config["num_hidden_layers"] * experts.num_experts > _MOST:
        raise ValueError(
            f"the config's layers must have at most {_MOST:,} experts in all, got "
            f"{config['num_hidden_layers']:,} of {experts.num_experts:,}; {REMEDY}"
        )
    for i in range(experts.num_experts):
        own += [
            Row(f"{at}.experts.{i}.{theirs}.weight", f"{mine}/{name}_kernel", one_of_many(),
                part=(i, i + 1))
            for theirs, name in names.items()
        ]  # fmt: skip
    return llama(config, experts, own)
