"""The private names of JAX that this package uses, with their expected signatures.

JAX may move or change them in any version. A part of the package that needs private names calls
`missing` before it loads them. If one is missing or its signature differs, only that part is off.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jaxlib.version

_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"
_QKV = "query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v"
# JAX 0.10 has no function of the scores.
_SETTINGS = "scale seed dropout_rate variadic_args mask_type layout sliding_window_length \
    score_mod_args? score_mod?"

# Before JAX 0.12, the offsets of packed keys counted query heads instead of key/value heads, which
# is wrong for grouped queries (JAX's issue 39521).
PACKED_GROUPS = jax.__version_info__ >= (0, 12)
# Before jaxlib 0.11.2, XLA aborts at the gradients of two `jax.shard_map`s in a row that leave
# axes of several devices Auto.
SHARDED_SUBGROUPS = jaxlib.version.__version_info__ >= (0, 11, 2)

# The private names of each part of this package, by module. A function that is called has its
# arguments: positional ones in order, then `*` and the keyword arguments, with ? if some versions
# lack one.
_PARTS: dict[str, dict[str, str]] = {
    "cudnn": {"jax._src.cudnn.fused_attention_stablehlo": f"""
        _dot_product_attention_fwd_impl({_QKV} * {_SETTINGS} is_training)
        _dot_product_attention_bwd_impl({_QKV} activation fwd_output grad_output * {_SETTINGS})
        _dot_product_attention_fwd_p_wrapper.bind _dot_product_attention_bwd_p_wrapper.bind
        MaskType.PADDING MaskType.PADDING_CAUSAL AttentionLayout.BTNH AttentionLayout.BNTH
        cuda_versions
    """},
    "splash": {
        f"{_SPLASH}kernel": """
            make_splash_mha(mask * block_sizes attn_logits_soft_cap residual_checkpoint_name
                head_shards q_seq_shards)
            BlockSizes(block_q block_kv * block_q_dkv block_kv_dkv block_q_dq block_kv_dq)
            SegmentIds(q kv) DEFAULT_MASK_VALUE
        """,
        f"{_SPLASH}mask": "Mask MultiHeadMask",
    },
    "flex": {"jax.extend.core": "Jaxpr ClosedJaxpr Literal"},
    "flex.tpu": {
        "jax.experimental.pallas": """
            pallas_call(kernel out_shape * grid_spec compiler_params input_output_aliases name)
            BlockSpec ds multiple_of num_programs program_id when
        """,
        "jax.experimental.pallas.tpu": """
            PrefetchScalarGridSpec(num_scalar_prefetch * grid in_specs out_specs scratch_shapes)
            CompilerParams(* dimension_semantics vmem_limit_bytes) SMEM VMEM
        """,
    },
    "flex.hopper": {
        "jax.extend.core": "ClosedJaxpr Literal jaxpr_as_fun",
        "jax.experimental.pallas": "ds loop run_scoped when",
        "jax.experimental.pallas.mosaic_gpu": """
            kernel(body * out_type scratch_types compiler_params grid grid_names num_threads
                thread_name)
            load(src * layout optimized) store(dst value * optimized) CompilerParams(* approx_math)
            Barrier(* num_arrivals num_barriers) ACC Layout.WGMMA.reduce SMEM SwizzleTransform
            TilingTransform barrier_arrive barrier_wait broadcasted_iota commit_smem
            copy_gmem_to_smem layout_cast set_max_registers wgmma
        """,
    },
    "only_on": {
        "jax.extend.core": "Primitive",
        "jax.interpreters.ad": "deflinear2",
        "jax.interpreters.batching": "defvectorized",
        "jax.interpreters.mlir": "register_lowering",
    },
    "use": {"jax.experimental.xla_metadata": "set_xla_metadata"},
    "vmap": {"jax._src.core": """
        get_axis_env AxisEnv.explicit_mesh_axis_names AxisEnv.spmd_axis_names
    """},
}  # fmt: skip


class Name(NamedTuple):
    """A name in a module, dotted for members of a class, with a called function's arguments."""

    module: str
    name: str
    arguments: str

    def wrong(self) -> str | None:
        """Return how the name differs from the expected one, or None."""
        path = f"{self.module}.{self.name}"
        try:
            value: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            return f"JAX {jax.__version__} has no {path}, which it needs"
        if self.arguments and not _fits(value, self.arguments):
            return f"{path} of JAX {jax.__version__} takes other arguments than this package gives"
        return None


NAMES = {
    part: [
        Name(module, *name)
        for module, names in modules.items()
        for name in re.findall(r"([\w.]+)(?:\(([^)]*)\))?", names)
    ]
    for part, modules in _PARTS.items()
}


@functools.cache
def missing(part: str) -> str | None:
    """Return why this JAX cannot run a part of the package, or None if it can."""
    return next((reason for name in NAMES.get(part, ()) if (reason := name.wrong())), None)


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Return True if a function has an argument of this name."""
    return argument in inspect.signature(function).parameters


def _fits(function: Any, arguments: str) -> bool:
    """Return True if a function takes these arguments and requires no others."""
    first, _, rest = (part.split() for part in arguments.partition("*"))
    try:
        signature = inspect.signature(function)
        named = [x for x in rest if not x.endswith("?") or x[:-1] in signature.parameters]
        bound = signature.bind(*first, **{x.removesuffix("?"): x.removesuffix("?") for x in named})
    except (TypeError, ValueError):
        return False
    return all(name == value for name, value in bound.arguments.items())
