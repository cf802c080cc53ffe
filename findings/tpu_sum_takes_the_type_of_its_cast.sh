#!/usr/bin/env bash
# A float32 sum that is cast to bfloat16 afterwards is compiled for TPUs as a bfloat16 sum.
#
# One expects `jnp.sum(x.astype(jnp.float32), axes).astype(jnp.bfloat16)` to add up in float32 and to round
# once, as it does on CPUs, and as the same program does with float16. libtpu 0.0.52 (JAX 0.12.0.1, compiled for
# a v5e without a chip) gives the reduction itself the type bfloat16. An optimization barrier between the sum and the
# cast, which keeps other rewrites away, does not prevent it. The gradient of every bias in bfloat16 has this form.
# What the chip accumulates in is not known from the program; its type no longer promises float32.
# Seen while reading the compiled gradient of an MLP with bfloat16 parameters.
# Instead: `jax.lax.reduce_precision(total, 8, 7).astype(jnp.bfloat16)`, which keeps the reduction in float32, or return
# the float32 sum.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python3; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1" "libtpu==0.0.52"
cat > "$folder/sums.py" <<'PY'
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[:1]
at = NamedSharding(Mesh(np.array(chips), ("d",)), PartitionSpec())


def reduced(function, dtype=jnp.bfloat16):
    """Return the types of the reductions in a program of one array."""
    x = jax.ShapeDtypeStruct((64, 128, 256), dtype, sharding=at)
    text = jax.jit(function).lower(x).compile().as_text()
    return sorted(set(re.findall(r"= (\w+)\[[\d,]*\]\S* reduce\(", text)))


def total(x):
    return jnp.sum(x.astype(jnp.float32), (0, 1))


found = {
    "no cast": reduced(total),
    "cast to bfloat16": reduced(lambda x: total(x).astype(jnp.bfloat16)),
    "barrier, cast": reduced(lambda x: jax.lax.optimization_barrier(total(x)).astype(jnp.bfloat16)),
    "reduce_precision, cast": reduced(
        lambda x: jax.lax.reduce_precision(total(x), 8, 7).astype(jnp.bfloat16)
    ),
    "float16, cast to float16": reduced(lambda x: total(x).astype(jnp.float16), jnp.float16),
}
print("jax", jax.__version__)
for name, types in found.items():
    print(f"{name:26} {types}")
f32, bf16 = ["f32"], ["bf16"]
sys.exit(list(found.values()) != [f32, bf16, bf16, f32, f32])
PY
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 "$folder/venv/bin/python" "$folder/sums.py" 2>/dev/null
