#!/usr/bin/env bash
# A reduce-scatter over all chips of some TPU slices is compiled as an all-reduce, of twice the bytes.
#
# One expects `jax.lax.psum_scatter` over a mesh axis, the gradient of an FSDP kernel, to stay a reduce-scatter: it is
# what the program says, and XLA for GPUs keeps it. libtpu 0.0.52 (JAX 0.12.0.1, compiled without chips) keeps it over
# the 32 chips of v5e:4x8, but over the 16 of v5e:4x4 it makes an all-reduce whose result is sliced; so it does over
# v5e:8x8 and v5p:2x2x2. Another order of the chips in the mesh changes nothing.
# Seen when a plan counted 24 MiB a block all-reduced where 12 should have been scattered.
# Instead: read the collectives of the compiled program. `--xla_tpu_reduce_scatter_collective_matmul_mode=post_spmd` in
# `LIBTPU_INIT_ARGS` sends shards during the product, by collective-permutes. An all-reduce can use the links of both
# axes at once, so time both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python3; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1" "libtpu==0.0.52"
cat > "$folder/scatter.py" <<'PY'
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

OPTION = {"xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd"}


def collectives(topology, options):
    """Return which collectives the gradient of a kernel sharded by FSDP has on all chips."""
    chips = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    mesh = Mesh(chips, ("data",))
    at = NamedSharding(mesh, P("data"))
    x, dy = (
        jax.ShapeDtypeStruct((512 * len(chips), n), jnp.bfloat16, sharding=at) for n in (1024, 4096)
    )

    def gradient(x, dy):
        return jax.lax.psum_scatter(x.T @ dy, "data", tiled=True)

    on_shards = jax.shard_map(gradient, mesh=mesh, in_specs=(P("data"),) * 2, out_specs=P("data"))
    text = jax.jit(on_shards).lower(x, dy).compile(compiler_options=options).as_text()
    # libtpu writes a reduce-scatter as a fusion of that name, with an all-reduce in it.
    entry = text[text.index("\nENTRY"):]
    names = {"scatter": r"all-reduce-scatter|reduce-scatter", "all-reduce": r" all-reduce(-start)?\(",
             "permute": r" collective-permute(-start)?\("}
    return {name for name, pattern in names.items() if re.search(pattern, entry)}


seen = {
    (topology, bool(options)): collectives(topology, options)
    for topology in ("v5e:4x4", "v5e:4x8") for options in ({}, OPTION)
}
print("jax", jax.__version__)
for (topology, chosen), found in seen.items():
    print(topology, "with the option" if chosen else "by default", sorted(found))
same = (
    seen["v5e:4x4", False] == {"all-reduce"}
    and "scatter" in seen["v5e:4x8", False]
    and all("permute" in found for (_, chosen), found in seen.items() if chosen)
)
sys.exit(None if same else "the behaviour has changed")
PY
cd "$folder"
env -u PYTHONPATH JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 "$folder/venv/bin/python" scatter.py 2>/dev/null
