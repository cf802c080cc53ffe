#!/usr/bin/env bash
# jax.checkpoint with `save_anything_except_these_names` keeps the array that it was told not to keep.
#
# One gathers a kernel inside jax.shard_map, names it with `checkpoint_name`, and expects the policy
# `save_anything_except_these_names` of that name to gather it again backward. The name is an operation of its own: the
# policy refuses its result, and keeps its operand, the gathered kernel, which has no name. With JAX 0.10.2 and 0.12.0.1
# as much is kept as without a name, and no warning tells.
# Seen when weights of experts, sharded over devices, stayed whole in memory until the backward pass.
# Instead: a policy that looks at the operation, such as `lambda operation, *_, **__: operation.name != "all_gather"`, or
# one that keeps only what it names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python3 python3.12 python3.11; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1"
cat > "$folder/names.py" <<'PY'
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
policies = jax.checkpoint_policies


def layer(x, shard, name):
    kernel = jax.lax.all_gather(shard, "x", tiled=True)
    kernel = checkpoint_name(kernel, "gathered") if name else kernel
    return jnp.tanh(x @ kernel)


def kept(policy, name):
    """Return the number of arrays of the size of the gathered kernel that wait for the backward pass."""

    def forward(x, shard):
        run = jax.checkpoint(lambda x, shard: layer(x, shard, name), policy=policy)
        return jax.tree.leaves(jax.vjp(run, x, shard)[1])

    specs = {"in_specs": (P(), P("x")), "out_specs": P("x"), "check_vma": False}
    over = jax.shard_map(lambda x, s: [a[None] for a in forward(x, s)], mesh=mesh, **specs)
    found = jax.eval_shape(over, jnp.ones((4, 16)), jnp.ones((16, 32)))
    return sum(array.shape[1:] == (16, 32) for array in found)


by_name = kept(policies.save_anything_except_these_names("gathered"), True)
unnamed = kept(policies.everything_saveable, False)
by_operation = kept(lambda operation, *_, **__: operation.name != "all_gather", False)
print(f"jax {jax.__version__}: whole kernels kept by name {by_name}, all kept {unnamed}, by operation {by_operation}")
sys.exit((by_name, unnamed, by_operation) != (1, 1, 0))
PY
"$folder/venv/bin/python" "$folder/names.py"
