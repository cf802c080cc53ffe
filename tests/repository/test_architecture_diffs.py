"""The changes shown in docs/architecture.md apply, are short, and work."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TRIED = {
    "mask": """
from flax_mha.masks import Causal, Global
first = np.arange(T) < 37
np.testing.assert_array_equal(Global(37).dense(T)[0], first | first[:, None])
same(mask=Global(37)), same(mask=Global(1000)), same(mask=~Global(64))
same(mask=Global(1) & Causal())
from tests.masks.catalogue import MASKS, Scene
scene = Scene((2,), T, T)
mask, allowed = MASKS["global"](scene)
np.testing.assert_array_equal(mask.dense(T), scene.table(allowed)[0, :1])
""",
    "score": """
from flax_mha.scores import Kerple
same(lambda a, b: {"scores": (Kerple(a, b),)}, jnp.array([1.0, 0.5]), jnp.array([2.0, 0.1]))
from tests.kernels.cases import Case
from tests.kernels.problems import problem_of
from tests.kernels.test_contract import TestReference
case = "causal", "2x7x7", "kerple", "soft", "gqa", "float32", "no_dropout", "from_0", "known"
TestReference().check(problem_of(Case(*case)), traced=False)
""",
    "option": """
from flax import nnx
import flax_mha.nnx
x = qkv[0].reshape(2, T, 8)
layer = flax_mha.MultiHeadAttention(2, value_scale=3.0, use_bias=False)
variables = jax.jit(layer.init)(jax.random.key(0), x)
out, plain = (jax.jit(layer.clone(value_scale=s).apply)(variables, x) for s in (3.0, 1.0))
np.testing.assert_allclose(out, 3 * plain, rtol=1e-5, atol=1e-6)
ours = flax_mha.nnx.MultiHeadAttention(2, 8, value_scale=3.0, use_bias=False, rngs=nnx.Rngs(0))
nnx.update(ours, nnx.State(variables["params"]))
np.testing.assert_allclose(ours(x), out, rtol=1e-6, atol=1e-6)
from tests.support import layer_model
from tests.support.layer_parts import PARTS
part = PARTS["scaled values"]
layer = flax_mha.MultiHeadAttention(2, **part.fields)
variables = jax.jit(layer.init)(jax.random.key(0), x)
want, _ = layer_model.layer(variables["params"], x[0], layer_model.Model(**part.model))
np.testing.assert_allclose(jax.jit(layer.apply)(variables, x)[0], want, rtol=1e-4, atol=1e-5)
""",
}
BEFORE = """
import jax, jax.numpy as jnp, numpy as np
import flax_mha
from flax_mha import masks
T = 300
qkv = np.random.default_rng(0).normal(size=(3, 2, T, 2, 4)).astype(np.float32)

def same(call=None, *args, **fixed):
    def pull(kernel):
        def loss(*args):
            given = call(*args) if call else fixed
            out = flax_mha.dot_product_attention(*qkv, kernel=kernel, **given)
            return jnp.sin(out).sum()
        pulled = jax.value_and_grad(loss, tuple(range(len(args)))) if args else loss
        return jax.jit(pulled)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3),
                 pull("blockwise"), pull("reference"))
"""


# Run each case in a fork that has imported everything but this package.
FORKS = """
import os, sys, traceback
import jax, numpy
from flax import linen, nnx

failed = []
for name, folder, code in CASES:
    if not (child := os.fork()):
        sys.path.insert(0, folder)
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def test_documented_changes_are_short() -> None:
    assert len(DIFFS) == len(TRIED)
    assert all(diff.count("\n") <= 65 for diff in DIFFS)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("git"), reason="needs git, to apply a diff")
def test_documented_changes_apply_and_work(tmp_path: Path) -> None:
    cases = []
    for (name, tried), diff in zip(TRIED.items(), DIFFS, strict=True):
        folder = tmp_path / name
        for part in ("flax_mha", "tests"):
            shutil.copytree(ROOT / part, folder / part)
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, check=True)
        code = f"{BEFORE}\n{tried}\nassert flax_mha.__file__.startswith({str(folder)!r})"
        cases.append((name, str(folder), code))
    code = f"CASES = {cases!r}\n{FORKS}"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
