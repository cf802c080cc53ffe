#!/usr/bin/env bash
# `jax.device_put(x, may_alias=False)` shares its memory with a NumPy array on a CPU, though it is documented to copy.
#
# One expects a JAX array to keep its numbers, and `may_alias=False` ("x will be copied") to make sure of it. On a CPU the
# result shares the memory of a NumPy array whose data begin at a multiple of 64 bytes: write to the array, or to the file
# behind a `np.memmap`, and the JAX array changes. `jax.device_put` without options and `jax.make_array_from_callback` do
# the same; `jnp.asarray`, from which one would sooner expect a view, copies. An array that begins at another address is
# copied by all. JAX 0.10.2 and 0.12.0.1.
# Seen in a loader of weights that maps its files, and might have had parameters that change with the file.
# Instead: `jnp.array(x)`, or `np.array(x)` before `device_put`, if the source may change.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python3; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "jaxlib==0.10.2"
cat > "$folder/alias.py" <<'PY'
import sys

import jax
import jax.numpy as jnp
import numpy as np

DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
WAYS = {
    "device_put": jax.device_put,
    "device_put(may_alias=False)": lambda x: jax.device_put(x, may_alias=False),
    "make_array_from_callback": lambda x: jax.make_array_from_callback(
        x.shape, DEVICE, lambda index: x[index]
    ),
    "jnp.asarray": jnp.asarray,
    "jnp.array": jnp.array,
}


def changes(way, offset):
    """Return whether a JAX array changes with its source, whose data begin so many bytes after a multiple of 64."""
    memory = np.zeros(2**20, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    source = memory[start : start + 2**18].view(np.float32)
    array = way(source).block_until_ready()
    source[:] = 7
    return bool(array[0] == 7)


print("jax", jax.__version__)
found = {name: (changes(way, 0), changes(way, 4)) for name, way in WAYS.items()}
for name, (aligned, other) in found.items():
    print(f"{name:28} shares aligned memory: {aligned}, other memory: {other}")
sys.exit(found != dict(zip(WAYS, 3 * [(True, False)] + 2 * [(False, False)])))
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/alias.py"
