#!/usr/bin/env bash
# Orbax's `BestN` keeps the best checkpoint until the program restarts, and then deletes it.
#
# One expects `CheckpointManagerOptions(preservation_policy=BestN(...))` with `save(..., metrics=...)` to keep the
# checkpoint of the lowest loss, in a resumed training too: the metrics are handed over to be stored with each step. They
# are stored only if `best_fn` is set as well, which the policy doesn't need and no error asks for. Without it the policy
# sees the metrics of this process's saves only: the first process keeps the best step, and the next save of another
# process deletes it. With `keep_checkpoints_without_metrics=True`, the default, it keeps all steps of earlier processes
# instead, for ever. Orbax 0.12.8.
# Seen in a trainer that keeps the checkpoint of the lowest test loss, whose folder was looked at after a resume.
# Instead: give `best_fn` and `best_mode` next to the policy, which makes Orbax write and read the metrics.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python3 python3.12 python3.11; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "orbax-checkpoint==0.12.8" "jax==0.10.2" "jaxlib==0.10.2"
cat > "$folder/best.py" <<'PY'
import sys
import tempfile

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

LOSSES = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3, 5: 0.2}


def kept(**options):
    """Return the steps that are kept after steps 1 to 3, and in a new manager after 4 and 5."""
    folder, found = tempfile.mkdtemp(dir=sys.argv[1]), []
    for steps in ((1, 2, 3), (4, 5)):
        best = BestN(
            get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=1,
            keep_checkpoints_without_metrics=False,
        )
        policy = AnyPreservationPolicy([LatestN(1), best])
        options |= {"preservation_policy": policy, "enable_async_checkpointing": False}
        with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**options)) as manager:
            for step in steps:
                state = ocp.args.StandardSave({"x": np.zeros(3)})
                manager.save(step, args=state, metrics={"loss": LOSSES[step]})
            found.append(list(manager.all_steps()))
    return found


policy_only = kept()
with_best_fn = kept(best_fn=lambda metrics: metrics["loss"], best_mode="min")
print("orbax", ocp.__version__, "losses by step", LOSSES)
print("kept before and after a restart:", *policy_only)
print("the same with best_fn:          ", *with_best_fn)
sys.exit((policy_only, with_best_fn) != ([[2, 3], [5]], [[2, 3], [2, 5]]))
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/best.py" "$folder" 2>/dev/null
