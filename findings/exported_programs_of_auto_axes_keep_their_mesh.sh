#!/usr/bin/env bash
# A program exported over Auto axes of a mesh runs only where the input divides as it did, over Explicit axes anywhere.
#
# One expects the same of both: a program needs as many devices as its mesh had, and how these lie is the caller's
# choice. A program of one `sin`, exported with its input sharded over a mesh of 2 x 2, runs on 4 devices in a row if
# the mesh had Explicit axes. If it had Auto axes, the call raises an error about a dimension that does not divide,
# though 4 rows divide over 4 devices. With JAX 0.10.2 and 0.12.0.1.
# Seen when the documentation of exported layers was tested.
# Instead: export over Explicit axes, or for one device without shardings, which runs on any mesh.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python3 python3.12 python3.11; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1"
cat > "$folder/meshes.py" <<'PY'
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)
x = np.arange(32, dtype=np.float32).reshape(4, 8)


def runs(kind, shape):
    """Export on a mesh of 2 x 2 with axes of a kind, and return True if it runs on a mesh of this shape."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, P("data", "model"))
        program = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place))
    names = "abc"[: len(shape)]
    other = jax.make_mesh(shape, tuple(names), axis_types=(AxisType.Auto,) * len(shape))
    try:
        result = jax.jit(program.call)(jax.device_put(x, NamedSharding(other, P("a"))))
    except ValueError as error:
        print(f"{kind.name} to {shape}:", type(error).__name__)
        return False
    return bool(np.allclose(result, np.sin(x), atol=1e-5))


found = {kind.name: [runs(kind, shape) for shape in ((2, 2), (4,))] for kind in (AxisType.Auto, AxisType.Explicit)}
print(f"jax {jax.__version__}: runs on 2 x 2, and on 4:", found)
sys.exit(found != {"Auto": [True, False], "Explicit": [True, True]})
PY
"$folder/venv/bin/python" "$folder/meshes.py"
