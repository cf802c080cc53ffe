"""gpt-oss, Mixtral and Qwen3-MoE: decoders like Llama's with experts in place of the MLP."""

from flax_mha.interop.config import activation, refuse
from flax_mha.interop.llama import llama
from flax_mha.interop.settings import REMEDY, Config, filled
from flax_mha.interop.table import Family, TensorRule, expert, linear, per_layer
from flax_mha.models.experts import Experts

# The most experts of all layers, as each has its own rules. Qwen3-235B-A22B has 12,032.
_MAX_EXPERTS = 2**15
_THEIRS, _MLP = "model.layers.{}", "decoder/layers_{}/mlp"


def gpt_oss(config: Config) -> Family:
    """Return the family of `GptOssForCausalLM`, with weights in bfloat16."""
    refuse(config, swiglu_alpha=1.702, hidden_act="silu")
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation="quick_gelu", limit=config.get("swiglu_limit", 7.0), offset=1.0, use_bias=True,
    )  # fmt: skip
    prefix = f"{_THEIRS}.mlp.experts"
    rows = [
        TensorRule(f"{_THEIRS}.self_attn.sinks", "decoder/layers_{}/attention/sinks"),
        *linear(f"{_THEIRS}.mlp.router", f"{_MLP}/router"),
    ]
    for suffix, leaf in (("", "kernel"), ("_bias", "bias")):
        pair = (f"{_MLP}/gate_{leaf}", f"{_MLP}/up_{leaf}")
        rows.append(TensorRule(f"{prefix}.gate_up_proj{suffix}", pair, alternate=True))
        rows.append(TensorRule(f"{prefix}.down_proj{suffix}", f"{_MLP}/down_{leaf}"))
    layers = config["num_hidden_layers"]
    return llama(config, [experts] * layers, per_layer(layers, rows), sinks=True)


def mixtral(config: Config) -> Family:
    """Return the family of `MixtralForCausalLM`."""
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"),
    )  # fmt: skip
    is_sparse = [True] * config["num_hidden_layers"]
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    return _family(config, experts, "block_sparse_moe", names, is_sparse)


def qwen3_moe(config: Config) -> Family:
    """Return the family of `Qwen3MoeForCausalLM`, where some layers may have an MLP instead."""
    dense, step = config.get("mlp_only_layers", ()), config.get("decoder_sparse_step", 1)
    # The setting has either name.
    local = config.get("num_local_experts")
    count = (config if local is None else filled(config, num_experts=local))["num_experts"]
    experts = Experts(
        config["moe_intermediate_size"], count, config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"), normalize=config.get("norm_topk_prob", False),
    )  # fmt: skip
    layers = range(config["num_hidden_layers"])
    is_sparse = [i not in dense and (i + 1) % step == 0 for i in layers]
    names = {f"{x}_proj": x for x in ("gate", "up", "down")}
    return _family(config, experts, "mlp", names, is_sparse)


def _family(
    config: Config, experts: Experts, part: str, names: dict[str, str], is_sparse: list[bool]
) -> Family:
    """Return a family whose experts have one tensor for each kernel, by the kernels' names."""
    rows = linear(f"{_THEIRS}.{part}.gate", f"{_MLP}/router", bias=False)
    if len(is_sparse) * experts.num_experts > _MAX_EXPERTS:
        raise ValueError(
            f"the config's layers must have at most {_MAX_EXPERTS:,} experts in all, got "
            f"{len(is_sparse):,} of {experts.num_experts:,}; {REMEDY}"
        )
    for i in range(experts.num_experts):
        prefix, index = f"{_THEIRS}.{part}.experts.{i}", (i, i + 1)
        rows += [
            TensorRule(f"{prefix}.{name}.weight", f"{_MLP}/{kernel}_kernel", expert(), part=index)
            for name, kernel in names.items()
        ]
    rows = per_layer((i for i, sparse in enumerate(is_sparse) if sparse), rows)
    return llama(config, [experts if sparse else None for sparse in is_sparse], rows)
