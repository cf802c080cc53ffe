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
from flax_mha.masks import Blocks
allowed = np.arange(T)[:, None] // 37 == np.arange(T) // 37
np.testing.assert_array_equal(Blocks(37).dense(T)[0], allowed)
same(mask=Blocks(37)), same(mask=Blocks(1000)), same(mask=~Blocks(64))
""",
    "score": """
from flax_mha.scores import Kerple
same(lambda a, b: {"scores": (Kerple(a, b),)}, jnp.array([1.0, 0.5]), jnp.array([2.0, 0.1]))
""",
    "kernel": """
assert flax_mha.explain(*qkv, kernel="plain").chosen == "plain"
assert "has no masks" in flax_mha.explain(*qkv, mask=masks.Causal()).refused["plain"]
out, want = (flax_mha.dot_product_attention(*qkv, kernel=k) for k in ("plain", "reference"))
np.testing.assert_allclose(out, want, atol=1e-6)
""",
    "variant": """
from flax import nnx
import flax_mha.nnx
from flax_mha.variants import NormedValuesAttention
x = qkv[0].reshape(2, T, 8)
layer = NormedValuesAttention(2, mask=masks.Causal())
params = layer.init(jax.random.key(0), x)["params"]
params["value_ln"]["scale"] = jnp.array([0.5, 2.0, 1.0, 3.0])
want = layer.apply({"params": params}, x)
unscaled = params | {"value_ln": {"scale": jnp.ones(4)}}
assert np.abs(want - layer.apply({"params": unscaled}, x)).max() > 0.01
ours = flax_mha.nnx.NormedValuesAttention(2, 8, mask=masks.Causal(), rngs=nnx.Rngs(0))
nnx.update(ours, nnx.State(params))
np.testing.assert_array_equal(ours(x), want)
""",
    "option": """
from flax import nnx
import flax_mha.nnx
x = qkv[0].reshape(2, T, 8)
layer = flax_mha.MultiHeadAttention(2, value_scale=3.0, use_bias=False)
variables = layer.init(jax.random.key(0), x)
out, plain = (layer.clone(value_scale=s).apply(variables, x) for s in (3.0, 1.0))
np.testing.assert_allclose(out, 3 * plain, rtol=1e-5, atol=1e-6)
ours = flax_mha.nnx.MultiHeadAttention(2, 8, value_scale=3.0, use_bias=False, rngs=nnx.Rngs(0))
nnx.update(ours, nnx.State(variables["params"]))
np.testing.assert_array_equal(ours(x), out)
""",
    "layer": """
from flax_mha import plain
from flax_mha.layer import core
params = plain.init(jax.random.key(0), 8, 2)
x = qkv[0].reshape(2, T, 8)
out = plain.apply(params, x, core.Settings(), mask=masks.Causal())
tree = {name: {"kernel": p} for name, p in params.items()}
tree["out"]["kernel"] = jnp.moveaxis(params["out"], 0, -1)
layer = flax_mha.MultiHeadAttention(2, use_bias=False)
want = layer.apply({"params": tree}, x, mask=masks.Causal())
np.testing.assert_allclose(out, want, atol=1e-6)
""",
}
BEFORE = """
import jax, jax.numpy as jnp, numpy as np
import flax_mha
from flax_mha import masks
T = 300
qkv = [jax.random.normal(jax.random.key(i), (2, T, 2, 4)) for i in range(3)]

def same(call=None, *args, **fixed):
    def pull(kernel):
        def loss(*args):
            given = call(*args) if call else fixed
            out = flax_mha.dot_product_attention(*qkv, kernel=kernel, **given)
            return jnp.sin(out).sum()
        return jax.value_and_grad(loss, tuple(range(len(args))))(*args) if args else loss()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3),
                 pull("blockwise"), pull("reference"))
"""


@pytest.mark.skipif(not shutil.which("git"), reason="needs git, to apply a diff")
@pytest.mark.parametrize(("name", "diff"), [*zip(TRIED, DIFFS, strict=True)], ids=list(TRIED))
def test_documented_change_applies_and_works(name: str, diff: str, tmp_path: Path) -> None:
    assert diff.count("\n") <= 60
    shutil.copytree(ROOT / "flax_mha", tmp_path / "flax_mha")
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    code = f"{BEFORE}\n{TRIED[name]}\nassert flax_mha.__file__.startswith({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
