"""The types of options name every argument."""

import inspect

from flax_mha import MultiHeadAttention, dot_product_attention, kernels, linen
from flax_mha.kernels.call import bind

RETURNS = {"return_weights", "return_residuals", "capture"}


def test_option_types_name_the_arguments() -> None:
    function = set(inspect.signature(dot_product_attention).parameters)
    assert {*bind.Options.__annotations__, *RETURNS, "q", "k", "v", "kernel"} == function
    call = set(inspect.signature(MultiHeadAttention.__call__).parameters)
    # The other arguments of a call: its inputs and results, and the refused arguments of Flax.
    others = {"self", "inputs_q", "inputs_k", "inputs_v", "return_weights", "return_kv", "refused"}
    assert {*linen.LayerOptions.__annotations__, *others} == call
    assert {*kernels.explain.__annotations__} >= {"q", "k", "v", "kernel", *RETURNS}
