"""The named tensors of a model, which captures read, edits change and rematerialization keeps."""

from typing import NamedTuple


class Tensor(NamedTuple):
    """A named tensor.

    Attributes:
      module: the module that computes it: "layer", "softmax" (the kernel of a layer), "block",
        "mlp" or "stack".
      shape: its shape after the batch axes.
      axes: the logical names of its last axes.
      editable: False if it can only be captured.
      named: True if taps give it its `checkpoint_name`.
    """

    module: str
    shape: str
    axes: tuple[str | None, ...]
    editable: bool = True
    named: bool = False


_ROWS, _PAIRS = ("batch", "heads", None), ("batch", "heads", None, None)
HEADS, KV_HEADS = (("batch", "length", name, "head_dim") for name in ("heads", "kv_heads"))
_FEATURES = ("batch", "norm_length", None)

TENSORS = {
    "q": Tensor("layer", "T, N, H", HEADS, named=True),
    "k": Tensor("layer", "S, K, H", KV_HEADS, named=True),
    "v": Tensor("layer", "S, K, H", KV_HEADS, named=True),
    "scores": Tensor("softmax", "N, T, S", _PAIRS),
    "weights": Tensor("softmax", "N, T, S", _PAIRS),
    "lse": Tensor("softmax", "N, T", _ROWS, editable=False),
    "entropy": Tensor("softmax", "N, T", _ROWS, editable=False),
    "max_logit": Tensor("softmax", "N, T", _ROWS, editable=False),
    "z": Tensor("layer", "T, N, H", HEADS),
    "result": Tensor("layer", "T, N, D", ("batch", "length", "heads", None)),
    "out": Tensor("layer", "T, D", _FEATURES, named=True),
    "resid_pre": Tensor("block", "T, D", _FEATURES),
    "resid_mid": Tensor("block", "T, D", _FEATURES),
    "resid_post": Tensor("block", "T, D", _FEATURES),
    "mlp_pre": Tensor("mlp", "T, F", ("batch", "length", "mlp"), named=True),
    "mlp_out": Tensor("block", "T, D", _FEATURES, named=True),
    "embed": Tensor("stack", "T, D", _FEATURES),
}
OF_SOFTMAX = tuple(name for name, x in TENSORS.items() if x.module == "softmax")
# What the backward pass can find in memory. Kernels name z and lse, and the MLP names mlp_hidden.
STORED = (*(name for name, x in TENSORS.items() if x.named), "z", "lse", "mlp_hidden")
