"""The private names of JAX that this package uses, with their expected signatures.

JAX may move or change them in any version. A part of the package that needs private names calls
`missing` before it loads them. If one is missing or its signature differs, only that part is off.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"
_PALLAS = "jax.experimental.pallas"


class Name(NamedTuple):
    """A private name of JAX, with its signatures.

    Attributes:
      module: the module's name.
      name: the name in that module, dotted for members of a class.
      forms: a function's arguments in each supported version: positional ones in order, then `*`
        and the keyword arguments. Empty if it is not called.
    """

    module: str
    name: str
    forms: tuple[str, ...] = ()

    def wrong(self) -> str | None:
        """Return how the name differs from the expected one, or None."""
        path = f"{self.module}.{self.name}"
        try:
            value: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            return f"JAX {jax.__version__} has no {path}, which it needs"
        if self.forms and not any(_fits(value, form) for form in self.forms):
            return f"{path} of JAX {jax.__version__} takes other arguments than this package gives"
        return None


def _names(module: str, names: str) -> tuple[Name, ...]:
    return tuple(Name(module, name) for name in names.split())


_QKV = "query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v"
_RESULTS = "activation fwd_output grad_output"
_SETTINGS = "scale seed dropout_rate variadic_args mask_type layout sliding_window_length"
# From JAX 0.11 on: a function of the scores, and its arguments.
_MOD = "score_mod_args score_mod"
_TILE = "q k v segment_ids sinks logsumexp do di * bq bkv is_mqa mask_info mask_value \
    attn_logits_soft_cap q_layout k_layout v_layout mask_function interpret"

# Before JAX 0.12, the offsets of packed keys counted query heads instead of key/value heads, which
# is wrong for grouped queries (JAX's issue 39521).
PACKED_GROUPS = jax.__version_info__ >= (0, 12)

# The private names of each part of this package.
NAMES: dict[str, tuple[Name, ...]] = {
    "cudnn": (
        Name(_CUDNN, "_dot_product_attention_fwd_impl", (
            f"{_QKV} * {_SETTINGS} is_training", f"{_QKV} * {_SETTINGS} is_training {_MOD}",
        )),
        Name(_CUDNN, "_dot_product_attention_bwd_impl", (
            f"{_QKV} {_RESULTS} * {_SETTINGS}", f"{_QKV} {_RESULTS} * {_SETTINGS} {_MOD}",
        )),
        Name(_CUDNN, "_dot_product_attention_fwd_p_wrapper.bind"),
        Name(_CUDNN, "_dot_product_attention_bwd_p_wrapper.bind"),
        *_names(_CUDNN, "MaskType.PADDING MaskType.PADDING_CAUSAL AttentionLayout.BTNH"),
        *_names(_CUDNN, "cuda_versions"),
    ),
    "splash": (
        Name(_SPLASH + "kernel", "_splash_attention_forward", (
            "fwd_mask_info q k v segment_ids sinks * mask_value is_mqa block_sizes "
            "residual_checkpoint_name save_residuals mask_function attn_logits_soft_cap interpret",
        )),
        Name(_SPLASH + "kernel", "_splash_attention_bwd_dkv", (
            f"{_TILE} bkv_compute use_fused_bwd_kernel",
        )),
        Name(_SPLASH + "kernel", "_splash_attention_bwd_dq", (_TILE,)),
        Name(_SPLASH + "kernel", "BlockSizes", ("block_q block_kv",)),
        Name(_SPLASH + "kernel", "SegmentIds", ("q kv",)),
        *_names(_SPLASH + "kernel", "QKVLayout.HEAD_DIM_MINOR DEFAULT_MASK_VALUE"),
        *_names(_SPLASH + "mask", "Mask MultiHeadMask NumpyMask"),
        Name(_SPLASH + "mask_info", "process_mask", ("mask block_shape",)),
        Name(_SPLASH + "mask_info", "process_mask_dkv", ("mask block_shape",)),
    ),
    "flex": _names("jax.extend.core", "Jaxpr ClosedJaxpr Literal"),
    "flex.tpu": (
        Name(_PALLAS, "pallas_call", ("kernel out_shape * grid_spec compiler_params name",)),
        *_names(_PALLAS, "BlockSpec when program_id"),
        Name(_PALLAS + ".tpu", "PrefetchScalarGridSpec", (
            "num_scalar_prefetch * grid in_specs out_specs scratch_shapes",
        )),
        Name(_PALLAS + ".tpu", "CompilerParams", ("* dimension_semantics",)),
        *_names(_PALLAS + ".tpu", "VMEM"),
    ),
    "flex.hopper": (
        *_names("jax.extend.core", "ClosedJaxpr DebugInfo.arg_names Jaxpr.replace Literal"),
        *_names("jax.extend.core", "jaxpr_as_fun"),
        *_names(_PALLAS, "ds loop run_scoped when"),
        Name(_PALLAS + ".mosaic_gpu", "kernel", (
            "body * out_type scratch_types compiler_params grid grid_names num_threads thread_name",
        )),
        Name(_PALLAS + ".mosaic_gpu", "load", ("src * layout optimized",)),
        Name(_PALLAS + ".mosaic_gpu", "store", ("dst value * optimized",)),
        Name(_PALLAS + ".mosaic_gpu", "CompilerParams", ("* approx_math",)),
        Name(_PALLAS + ".mosaic_gpu", "Barrier", ("* num_arrivals num_barriers",)),
        *_names(_PALLAS + ".mosaic_gpu", "ACC Layout.WGMMA.reduce SMEM SwizzleTransform"),
        *_names(_PALLAS + ".mosaic_gpu", "TilingTransform barrier_arrive barrier_wait"),
        *_names(_PALLAS + ".mosaic_gpu", "broadcasted_iota commit_smem copy_gmem_to_smem"),
        *_names(_PALLAS + ".mosaic_gpu", "layout_cast set_max_registers wgmma"),
    ),
    "limits": (
        *_names("jax.extend.core", "Primitive"),
        *_names("jax.interpreters.ad", "Zero deflinear2 primitive_jvps primitive_transposes"),
        *_names("jax.interpreters.batching", "defvectorized primitive_batchers"),
        *_names("jax.interpreters.mlir", "register_lowering"),
    ),
    "any_derivative": _names("jax.experimental.xla_metadata", "set_xla_metadata"),
    "vmap": _names(
        "jax._src.core", "get_axis_env AxisEnv.explicit_mesh_axis_names AxisEnv.spmd_axis_names"
    ),
}  # fmt: skip


@functools.cache
def missing(part: str) -> str | None:
    """Return why this JAX cannot run a part of the package, or None if it can."""
    return next((reason for name in NAMES.get(part, ()) if (reason := name.wrong())), None)


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Return True if a function has an argument of this name."""
    return argument in inspect.signature(function).parameters


def _fits(function: Any, form: str) -> bool:
    """Return True if a function accepts these arguments and requires no others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional, _, named = form.partition("*")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.kind not in variable]
    needed = {p.name for p in parameters if p.kind not in variable and p.default is p.empty}
    first, keywords = positional.split(), named.split()
    return (
        names[: len(first)] == first
        and set(keywords) <= set(names)
        and needed <= {*first, *keywords}
    )
