"""Convert a Hugging Face folder to an Orbax checkpoint, and back.

    python -m experiments.convert path/to/Qwen3-0.6B converted
    python -m experiments.convert converted path/to/mine --dtype=bfloat16

Both have `config.json` and the model's other files, such as its tokenizer. The weights are
safetensors in the former and `variables` in the latter.
Any program restores these with `orbax.checkpoint.StandardCheckpointer().restore(path)`.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import flags

from experiments.common import command
from experiments.common.failures import RunError
from experiments.common.outputs import result_folder
from flax_mha import interop
from flax_mha.base import checks
from flax_mha.interop import safetensors
from flax_mha.interop.checked_config import several
from flax_mha.interop.folders import CONFIG, carry

DTYPE = flags.DEFINE_string("dtype", None, "The dtype of floating parameters (default: unchanged).")

_WEIGHTS = "variables"


def main(argv: list[str]) -> None:
    """Convert the first folder into the second."""
    source, target = argv[1:]
    print(convert(source, target, dtype=DTYPE.value))


def convert(source: str | Path, target: str | Path, dtype: Any = None) -> str:
    """Convert one folder to the other form, and return a description of the result.

    Args:
      source: a folder of either form.
      target: a folder that does not exist yet, or is empty.
      dtype: the dtype of floating parameters (default: unchanged).
    """
    source = Path(source).expanduser().absolute()
    config = safetensors.read_json(source / CONFIG)
    target = result_folder(Path(target).expanduser(), "converted", "the second folder")
    if (source / _WEIGHTS).is_dir():
        try:
            variables = ocp.StandardCheckpointer().restore(source / _WEIGHTS)
        except Exception as error:
            place, words = source / _WEIGHTS, f"{type(error).__name__}: {error}".splitlines()[0]
            raise RunError(f"{place} must be a checkpoint of Orbax, got {words:.200}") from error
        if dtype is not None:
            wanted = checks.dtype("dtype", dtype)
            variables = jax.tree.map(
                lambda x: x.astype(wanted) if jnp.issubdtype(x.dtype, jnp.floating) else x,
                variables,
            )
        interop.save(config, variables, target)
        left = carry(source, target, ignored=(_WEIGHTS,))
        kind = "safetensors"
    else:
        _, variables = interop.load(source, dtype=dtype)
        with ocp.StandardCheckpointer() as checkpointer:
            # As NumPy arrays: JAX arrays are tied to the devices of this machine.
            checkpointer.save(target / _WEIGHTS, jax.tree.map(np.array, variables))
        (target / CONFIG).write_bytes((source / CONFIG).read_bytes())
        left = carry(source, target)
        kind = "a checkpoint of Orbax"
    count = sum(x.size for x in jax.tree.leaves(variables))
    said = f"{target}: {count:,} parameters of a {config['model_type']}, {kind}"
    return f"{said}; left behind: {several(left)}" if left else said


if __name__ == "__main__":
    command.run(main, words=("SRC", "DST"))
