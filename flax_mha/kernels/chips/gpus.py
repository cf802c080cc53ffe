"""NVIDIA GPUs: the compute capability of each, here or elsewhere."""

import jax

# The compute capability of GPUs by a word of their names, to compile for GPUs that are not local.
# Source: developer.nvidia.com/cuda/gpus.
CAPABILITIES = {
    "V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "A10G": (8, 6), "A40": (8, 6),
    "L4": (8, 9), "L40": (8, 9), "L40S": (8, 9), "H100": (9, 0), "H200": (9, 0), "H20": (9, 0),
    "GH200": (9, 0), "B200": (10, 0), "GB200": (10, 0), "B300": (10, 3), "GB300": (10, 3),
}  # fmt: skip


def capability(device: str) -> tuple[int, int] | str:
    """Return the compute capability of a GPU, local or not, or the reason why it is not known."""
    local = jax.local_devices()[0]
    if device == local.device_kind:
        if "cuda" not in local.client.platform_version:
            return f"runs on NVIDIA GPUs only, this is {local.device_kind}"
        major, minor = (int(x) for x in local.compute_capability.split("."))
        return major, minor
    # As NVIDIA's driver names them: "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3".
    words = device.replace("-", " ").split()
    known = (CAPABILITIES[word] for word in words if word in CAPABILITIES)
    return next(known, f"knows no compute capability of {device!r}, which is not here")
