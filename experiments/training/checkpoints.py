"""The states of a run on disk, by Orbax."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.failures import RunError
from experiments.training.program import Program


class Checkpoints:
    """The last two checkpoints of a run; a context, at whose end all are written."""

    def __init__(self, workdir: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(workdir.absolute() / "checkpoints", options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def latest_step(self) -> int:
        """The step of the latest, 0 if there is none."""
        return self._manager.latest_step() or 0

    def restore(self, program: Program, data: Any) -> Any:
        """The latest state; the data iterator is moved to where it was then."""
        restored = self._manager.restore(
            self._manager.latest_step(),
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(program.abstract_state()),
                data=ocp.args.JsonRestore(),
            ),
        )
        data.set_state(restored.data)
        return restored.state

    def save(self, step: int, state: Any, data: Any) -> None:
        """Begins to write; the next save waits for its end."""
        # The order of the data is the same on all processes: one file serves any number of them.
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data.get_state())
            ),
        )

    def end(self, step: int, workdir: Path) -> None:
        """Ends the program once all is written, and says how to go on."""
        self._manager.wait_until_finished()
        line = f"stopped at step {step}; to go on: --workdir={workdir}"
        raise SystemExit(line if jax.process_index() == 0 else 1)


def load(program: Program, workdir: Path) -> Any:
    """The latest state that a run has saved, on the devices of the program.

    Raises:
      RunError: if there is none.
    """
    with program.on_mesh(), Checkpoints(workdir) as checkpoints:
        if not checkpoints.latest_step():
            raise RunError(f"{workdir} has no checkpoint yet; train it first")
        return checkpoints.restore(program, program.batches())
