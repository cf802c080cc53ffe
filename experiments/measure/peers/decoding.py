"""Time steps of one token, and a prompt, with a cache of a fixed size, beside other libraries.

    python -m experiments.measure decoding

Each contestant holds its own cache, donated to every step, and all run in turns. GB/s counts what
a step must read: the keys and values of the tokens so far, and the layer's parameters. A GPU runs
many sizes (B = 1 … 256, S = 1,024 … 32,768, bfloat16), a CPU one. If PyTorch is installed, it takes
part with a static cache and `scaled_dot_product_attention`. Tables are printed, and table.md and
results.json go to --workdir (default: a new folder under runs/).
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments import tables
from experiments.measure import machine, timing
from experiments.measure.peers import cases, races, torch_peers
from experiments.measure.timing import Failure, Timing, Work
from experiments.phases import Phase
from experiments.runs import folders
from flax_mha import CacheConfig, MultiHeadAttention

PROMPT = 1024
COLUMNS = ("", "tokens held", "median", "tokens/s", "GB/s", "× linen", "")
Row = dict[str, Any]


class Size(NamedTuple):
    """The size of a race: B rows, S slots, D = N·H features, and the dtype of all arrays."""

    B: int
    S: int
    N: int
    D: int
    dtype: str

    def bytes(self, filled: int, stored: str | None = None) -> int:
        """Return the minimum bytes that a step reads: keys, values and four projections."""
        held = jnp.dtype(stored or self.dtype).itemsize + (4 * self.N / self.D if stored else 0)
        return int(2 * self.B * filled * self.D * held) + 4 * self.D**2 * self.item

    @property
    def item(self) -> int:
        """The bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def most(self) -> int:
        """The bytes of the caches of all contestants of a race, with room to create them."""
        return 6 * 2 * self.B * self.S * self.D * self.item


class Entry(NamedTuple):
    """A contestant with its step, its number of cached tokens, and their dtype."""

    name: str
    make: Callable[[Size, int], Work]
    filled: int
    stored: str | None = None


def sizes(free: int | None, flags: argparse.Namespace) -> Iterator[Size]:
    """Yield the sizes that suit the device, or the sizes of the flags."""
    if flags.lengths:
        for S in flags.lengths:
            yield Size(flags.batch or 8, S, flags.heads, flags.features, flags.dtype)
    elif jax.default_backend() == "cpu":
        yield Size(8, 2048, 8, 512, "float32")
    else:
        every = (Size(B, S, 8, 1024, "bfloat16") for S in (1024, 8192, 32768)
                 for B in (1, 8, 64, 256))  # fmt: skip
        yield from (size for size in every if free is None or size.most < free)


def entries(size: Size) -> list[Entry]:
    """Return the contestants: full caches, ours nearly empty, and ours in int8."""
    full, little = size.S - size.S // 4, size.S // 64
    return [
        Entry("linen", functools.partial(_work, linen=True), full),
        Entry("ours", _work, full),
        Entry("ours, nearly empty", _work, little),
        Entry("ours, int8", functools.partial(_work, stored="int8"), full, "int8"),
        Entry("torch SDPA, static cache", torch_peers.decoding, full),
    ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    races.add_sizes(parser)
    parser.add_argument("--dtype", choices=cases.DTYPES, default="float32", help="of --lengths")
    parser.set_defaults(seconds=10.0, total=3600.0)


def run(flags: argparse.Namespace) -> None:
    """Time steps at each size, and a prompt at the first."""
    folder = folders.result_folder(flags.workdir, "decoding")
    end = time.perf_counter() + flags.total
    header = races.introduce()
    rows: list[Row] = []
    texts: list[str] = []
    ran: list[Size] = []
    place = ""
    for size in sizes(machine.free_bytes(), flags):
        if time.perf_counter() > end:
            break
        with Phase(f"timing steps of B={size.B}, S={size.S}"):
            here = race(size, flags.repeats, flags.seconds)
            torch_peers.release()
        if all(row["seconds"] for row in here if row["label"] in ("linen", "ours")):
            ran.append(size)
        rows += here
        texts.append(table(here))
        print(texts[-1], flush=True)
        place = tables.write(folder, "\n\n".join(texts), {**header, "rows": rows})
    if not ran or time.perf_counter() > end:
        print(f"no time or no memory left for a prompt; {place}")
        return
    header["prefill"] = prefill(ran[0], flags.seconds)
    texts.append(
        "a prompt of {tokens:,} tokens: {seconds:.3g} s in one call, {token_by_token:.3g} s token "
        "by token, {ratio:.1f} times as long; {linen:.3g} s with linen's steps".format(
            **header["prefill"])
    )  # fmt: skip
    print(texts[-1])
    print(tables.write(folder, "\n\n".join(texts), {**header, "rows": rows}))


def race(size: Size, rounds: int, seconds: float) -> list[Row]:
    """Time the steps of all contestants in turns."""
    here = entries(size)
    works = {
        entry.name: timing.attempt(functools.partial(entry.make, size, entry.filled))
        for entry in here
    }
    # Steps wait for each other by themselves: each takes the previous one's cache.
    found = timing.interleave(works, rounds, seconds)
    base, rows = found["linen"], []
    for name, _, filled, stored in here:
        row: Row = {
            **size._asdict(), "label": name, "filled": filled, "status": "ok", "reason": None,
            "bytes": size.bytes(filled, stored), "seconds": None,
        }  # fmt: skip
        taken = found[name]
        if isinstance(taken, Failure):
            row |= {"status": taken.status, "reason": taken.reason}
        else:
            row |= {"seconds": taken._asdict(), "tokens_per_second": size.B / taken.median,
                    "bytes_per_second": row["bytes"] / taken.median}  # fmt: skip
            if isinstance(base, Timing):
                row["ratio"] = base.median / taken.median
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the table of one size in Markdown."""
    title = "one step: B={B}, S={S:,}, D={D}, {N} heads, {dtype}\n".format(**rows[0])
    lines = [title, tables.head(*COLUMNS)]
    for row in rows:
        cells = ["", "", "", ""]
        if row["seconds"]:
            cells = [
                tables.duration(row["seconds"]["median"]), f"{row['tokens_per_second']:,.0f}",
                f"{row['bytes_per_second'] / 1e9:.3g}",
                f"{row['ratio']:.2f}" if "ratio" in row else "",
            ]  # fmt: skip
        note = "" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
        lines.append(tables.line(row["label"], f"{row['filled']:,}", *cells, note))
    return "\n".join(lines)


def prefill(size: Size, seconds: float) -> dict[str, Any]:
    """Time a prompt of `PROMPT` tokens in one call, and in single steps of ours and linen's.

    Steps are timed 32 at a time, after none, a quarter, a half and three quarters of the tokens.
    """
    prompt = min(PROMPT, size.S // 2)
    layers = {"ours": _layer(size), "linen": _layer(size, linen=True)}
    steps = {name: _step(layer, params) for name, (layer, params, _) in layers.items()}

    def mean(name: str, width: int, calls: int, filled: int) -> float:
        layer, _, x = layers[name]
        piece, held = x[:, :width], jax.block_until_ready(_cache(layer, size, filled))
        start = time.perf_counter()
        for _ in range(calls):
            out, held = steps[name](held, piece)
        jax.block_until_ready((out, held))
        return (time.perf_counter() - start) / calls

    def by_token(name: str) -> float:
        return prompt / 4 * sum(mean(name, 1, 32, n * prompt // 4) for n in range(4))

    mean("ours", prompt, 1, 0), mean("ours", 1, 1, 0), mean("linen", 1, 1, 0)  # compiles
    samples: list[tuple[float, float, float]] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        samples.append((mean("ours", prompt, 1, 0), by_token("ours"), by_token("linen")))
    once, ours, linen = (timing.summary(list(x)).median for x in zip(*samples, strict=True))
    found = {"tokens": prompt, "seconds": once, "token_by_token": ours, "linen": linen}
    return {**found, "ratio": ours / once, **size._asdict()}


def _layer(size: Size, linen: bool = False, stored: str | None = None) -> tuple[Any, Any, Any]:
    """Return a layer that decodes, its parameters, and tokens for a prompt."""
    fields: Any = {"num_heads": size.N, "decode": True, "dtype": size.dtype}
    fields["param_dtype"] = size.dtype
    ours = functools.partial(MultiHeadAttention, cache=CacheConfig(stored))
    layer = (nn.MultiHeadDotProductAttention if linen else ours)(**fields)
    x = jax.random.normal(jax.random.key(1), (size.B, PROMPT, size.D), size.dtype)
    return layer, layer.init(jax.random.key(0), x[:, :1])["params"], x


def _cache(layer: nn.Module, size: Size, filled: int) -> Any:
    """Return a cache of S slots that holds `filled` tokens, all zeros."""
    room = jax.ShapeDtypeStruct((size.B, size.S, size.D), size.dtype)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), room)["cache"]
    held = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return _set_back(held, filled)


def _set_back(held: Any, filled: int) -> Any:
    """Return the cache, ours or Flax's, as if it held `filled` tokens."""
    if "kv" in held:
        kv = held["kv"]
        return {"kv": kv.replace(length=jnp.full_like(kv.length, filled))}
    return {**held, "cache_index": jnp.full_like(held["cache_index"], filled)}


def _step(layer: nn.Module, params: Any) -> Callable[[Any, jax.Array], tuple[jax.Array, Any]]:
    def step(params: Any, cache: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        out, new = layer.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return out, new["cache"]

    compiled = jax.jit(step, donate_argnums=1)
    return lambda cache, x: compiled(params, cache, x)


def _work(size: Size, filled: int, linen: bool = False, stored: str | None = None) -> Work:
    """Return continued steps that restart before the number of tokens doubles."""
    layer, params, x = _layer(size, linen, stored)
    step, start = _step(layer, params), _cache(layer, size, filled)
    most = min(filled, size.S - filled)
    state = {"cache": start, "left": most}
    token = x[:, :1]

    def call() -> jax.Array:
        if state["left"] == 0:
            state.update(cache=_set_back(state["cache"], filled), left=most)
        out, cache = step(state["cache"], token)
        state.update(cache=cache, left=state["left"] - 1)
        return out

    return Work(call, jax.block_until_ready)
