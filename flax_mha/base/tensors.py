"""The names of tensors, which captures read, edits change and rematerialization keeps."""

# Values of a softmax, which the kernel computes along with the output.
OF_SOFTMAX = ("weights", "scores", "lse", "entropy", "max_logit")
# Points: tensors of a layer, of a stack, and of the block around a layer.
POINTS = (
    "q", "k", "v", "z", "result", "out", "embed", "resid_pre", "resid_mid", "resid_post", "mlp_pre",
    "mlp_out",
)  # fmt: skip
# Tensors that the forward pass can store for the backward pass, by their `checkpoint_name`.
STORED = ("q", "k", "v", "z", "lse", "out", "mlp_pre", "mlp_hidden", "mlp_out")
