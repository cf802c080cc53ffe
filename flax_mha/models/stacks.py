"""Stacks of blocks."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.cache import KeyValues, collection
from flax_mha.layer.settings import check_module
from flax_mha.linen import LayerOptions, MultiHeadAttention, with_parameters
from flax_mha.models import remat
from flax_mha.models.blocks import Block, DecoderBlock, EncoderBlock
from flax_mha.scores import ScoreMod, as_scores
from flax_mha.sharding import rules
from flax_mha.taps.tap import COLLECTION, tap_of

Inputs: TypeAlias = tuple[jax.Array, ...]
Options: TypeAlias = dict[str, Any]
# By how much the index of the layer whose keys each layer uses differs from its own, or None.
Offsets: TypeAlias = Sequence[int | None]


class Place(NamedTuple):
    """The place of a layer's variables in those of a stack.

    Attributes:
      path: the path, such as ("layers_0",), or under a scan ("layers", "block_1").
      block: the index of the block that the layer copies.
      step: the index on the leading axis of layers, of a layer under a scan; None for others.
    """

    path: tuple[str, ...]
    block: int
    step: int | None


class Stack(nn.Module):
    """A stack of blocks, with a final norm unless they are post-norm.

    Attributes:
      num_layers: the number of layers.
      block: the block that each layer copies, with separate parameters; or several blocks to
        alternate, such as five with a window and one without.
      scan: True to run the layers by `nn.scan`, compiled once instead of num_layers times. The
        parameters are then stacked on a leading axis under `layers` instead of `layers_0`, … One
        step has all alternating blocks, as `block_0`, `block_1`, …; layers that fill no step keep
        their name `layers_i`.
      scores: score functions of all self-attention layers, applied after the layers' own. Their
        parameters are shared, such as the table of `RelativeBias()` in T5.
      input_norm: True for a norm before the first block (BERT, CLIP).
      final_norm: True for a norm after the last block (default: unless the blocks are post-norm).
      kv_from: for each layer, the index of an earlier layer whose keys and values its
        self-attention uses, or None, such as (None, None, 0, 1). A layer with an index has no
        parameters for keys and values, and no cache. With `scan` both layers must be in the same
        step (default: None for all).

    Sources: Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
    2024, and Sun et al., "You Only Cache Once", 2024 (kv_from).
    """

    num_layers: int
    block: Block | Sequence[Block]
    scan: bool = False
    scores: Sequence[ScoreMod] = ()
    input_norm: bool = False
    final_norm: bool | None = None
    kv_from: Sequence[int | None] | None = None

    kind: ClassVar[type[Block]] = Block

    def __post_init__(self) -> None:
        """Convert lists to tuples, as JAX needs hashable modules."""
        for name in ("block", "kv_from"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, tuple(getattr(self, name)))
        super().__post_init__()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The alternating blocks."""
        blocks = self.block if isinstance(self.block, tuple) else (self.block,)
        for block in blocks:
            check_module("block", block, self.kind)
            check_module("attention", block.attention, MultiHeadAttention)
        if not blocks:
            raise ValueError("block must be a block or several, got none; give one")
        return blocks

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of the layers. Those that fill no step of a scan are beside it."""
        size = len(self.blocks)
        scanned = self.num_layers // size * size if self.scan else 0

        def place(i: int) -> Place:
            step, block = divmod(i, size)
            if i >= scanned:
                return Place((f"layers_{i}",), block, None)
            return Place(("layers", f"block_{block}") if size > 1 else ("layers",), block, step)

        return tuple(map(place, range(self.num_layers)))

    @property
    def first(self) -> Block:
        """The first block, whose dtypes the stack uses."""
        return self.blocks[0]

    @property
    def decodes(self) -> bool:
        """True if its attention layers keep a cache."""
        return bool(getattr(getattr(self.first, "attention", None), "decode", False))

    @nn.nowrap
    def run(self, x: jax.Array, *others: jax.Array | None, **call: Any) -> jax.Array:
        """Run the blocks in sequence, each with the same other inputs and arguments."""
        with rules.undivided_tokens(self.decodes):
            checks.fields(self)
            shapes.check_features("x", x)
            checks.positive(num_layers=self.num_layers)
            # User-defined blocks need not take arguments that are None.
            inputs = tuple(x for x in others if x is not None)
            call = {name: x for name, x in call.items() if x is not None}
            blocks = self.blocks
            x = sharding.constrain(x, ("batch", "norm_length", None))
            x = tap_of(self, self.first.attention.capture).last("embed", x)
            if self.input_norm:
                x = self.first.make_norm("input_norm", self)(x)
            if self.scores:
                scores = with_parameters(self, self.scores, self.first.attention, x.shape[-1])
                call["scores"] = scores + as_scores(call.get("scores", ()))
            by_layer, offsets = self._by_layer(call), self._offsets(call)
            rotates = [block.attention.rotary is not None for block in blocks]
            # If only some layers rotate, the others get no positions.
            unrotated = {name: x for name, x in call.items() if name != "positions"}
            by_block = [call if has_rope or not any(rotates) else unrotated for has_rope in rotates]
            scanned = sum(place.step is not None for place in self.places)
            if scanned:
                x = self._scan(x, inputs, by_block, by_layer[:scanned], offsets[: len(blocks)])
            looped = self.places[scanned:]
            x = _run_blocks(
                [blocks[place.block].copy(name=place.path[0]) for place in looped], x, inputs,
                [by_block[y.block] | z for y, z in zip(looped, by_layer[scanned:], strict=True)],
                offsets[scanned:],
            )  # fmt: skip
            final = not self.first.post_norm if self.final_norm is None else self.final_norm
            return self.first.make_norm("norm", self)(x) if final else x

    @nn.nowrap
    def _scan(
        self, x: jax.Array, inputs: Inputs, by_block: Sequence[Options],
        by_layer: Sequence[Options], offsets: Offsets,
    ) -> jax.Array:  # fmt: skip
        """Run a scan whose steps have all blocks."""
        blocks = self.blocks
        if not self.decodes:
            blocks = tuple(block.copy(remat=remat.in_scan(block.remat)) for block in blocks)

        def step(
            module: Any, x: jax.Array, inputs: Inputs, by_layer: Sequence[Options]
        ) -> tuple[jax.Array, None]:
            options = [x | y for x, y in zip(by_block, by_layer, strict=True)]
            if isinstance(module, _Group):
                return module(x, inputs, options, offsets), None
            return _run_blocks([module], x, inputs, options, offsets), None

        count = len(by_layer) // len(blocks)
        caches = self.variables.get("cache", {}).get("layers")
        # A call with an encoder's output makes memories, perhaps of another size.
        cross = [getattr(block, "cross_attention", None) for block in blocks]
        keeps = not (inputs and any(getattr(layer, "decode", False) for layer in cross))
        in_place = keeps and caches is not None
        axes: dict[Any, Any] = {"params": 0, "intermediates": 0, COLLECTION: 0}
        scanned = nn.scan(
            _write_in_place(step) if in_place else step,
            variable_axes=axes if in_place else axes | {"cache": 0},
            variable_carry="cache" if in_place else False,
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, 0, 0) if in_place else (nn.broadcast, 0),
            length=count,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        group = _Group(blocks, name="layers") if len(blocks) > 1 else blocks[0].copy(name="layers")
        by_step = [by_layer[i :: len(blocks)] for i in range(len(blocks))]
        stacked = [jax.tree.map(lambda *x: jnp.stack(x), *options) for options in by_step]
        # The carry of a scan must keep its dtype.
        layer = self.first.attention
        computed = layer.dtype or jnp.promote_types(x.dtype, layer.param_dtype)
        x = x.astype(computed if self.first.post_norm else jnp.promote_types(x.dtype, computed))
        indices = (jnp.arange(count, dtype=jnp.int32),) if in_place else ()
        return scanned(group, x, inputs, stacked, *indices)[0]

    @nn.nowrap
    def _offsets(self, call: dict[str, Any]) -> Offsets:
        """Check `kv_from`, and return it relative to each layer."""
        if self.kv_from is None:
            return (None,) * self.num_layers
        kv_from = self.kv_from
        if not isinstance(kv_from, tuple) or len(kv_from) != self.num_layers:
            raise ValueError(
                f"kv_from must be a tuple of a layer's index or None for each of the "
                f"{self.num_layers} layers, got {kv_from!r}; change it"
            )
        if call.get("kv") is not None:
            raise ValueError("kv= must be None with kv_from, got both; give one of the two")
        for i, source in enumerate(kv_from):
            if source is None:
                continue
            checks.integer(f"kv_from[{i}]", source)
            legal = [n for n in range(i) if kv_from[n] is None]
            if source not in legal:
                raise ValueError(
                    f"kv_from[{i}] must be None or an earlier layer with keys and values, one of "
                    f"{legal}, got {source} in {kv_from}; change it"
                )
        offsets = [None if source is None else source - i for i, source in enumerate(kv_from)]
        size = len(self.blocks)
        of_step = [offsets[i % size] for i in range(self.num_layers)]
        if self.scan and offsets != of_step:
            repeated = tuple(None if n is None else i + n for i, n in enumerate(of_step))
            raise ValueError(
                f"kv_from must name layers of the same step under scan (a step has {size}), alike "
                f"in all steps: {repeated}, got {kv_from}; give block= more blocks, or scan=False"
            )
        return offsets

    @nn.nowrap
    def _by_layer(self, call: Options) -> list[Options]:
        """Remove the arguments that differ by layer from a call, and return them for each layer.

        These are dropout keys, so that layers drop different weights, and head masks in a list.
        """
        differing: dict[str, list[jax.Array]] = {}
        if "dropout_rng" in call:
            key = checks.key("dropout_rng", call.pop("dropout_rng"))
            differing["dropout_rng"] = [*jax.random.split(key, self.num_layers)]
        if isinstance(head_masks := call.get("head_mask"), list | tuple):
            if len(head_masks) != self.num_layers:
                raise ValueError(
                    f"head_mask must be one array, or a list of one for each of the "
                    f"{self.num_layers} blocks, got {len(head_masks)}; give jnp.ones(N) for blocks "
                    f"that keep all heads"
                )
            differing["head_mask"] = [*map(jnp.asarray, call.pop("head_mask"))]
        return [{name: xs[i] for name, xs in differing.items()} for i in range(self.num_layers)]


class _Group(nn.Module):
    """The alternating blocks, as one step of a scan."""

    blocks: Sequence[Block]

    @nn.compact
    def __call__(
        self, x: jax.Array, inputs: Inputs, options: Sequence[Options], offsets: Offsets
    ) -> jax.Array:
        blocks = [block.copy(name=f"block_{n}") for n, block in enumerate(self.blocks)]
        return _run_blocks(blocks, x, inputs, options, offsets)


def _write_in_place(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scan's step with a layer's index, of which the cache of all layers is a carry.

    As inputs and outputs of the scan, the caches of all layers would be copied.
    """

    def run(module: Any, x: Any, inputs: Inputs, by_layer: Any, layer: jax.Array) -> Any:
        # The variables of each module among the fields, in the order in which Flax maps them.
        stacks: list[Any] = []

        def of_layer(variables: Any) -> Any:
            stacks.append(variables)
            return collection.of_layer(variables, layer)

        def to_stack(variables: Any) -> Any:
            return collection.to_stack(variables, stacks.pop(0), layer)

        mapped = nn.map_variables(step, "cache", of_layer, to_stack, mutable=True)
        return mapped(module, x, inputs, by_layer)

    return run


def _run_blocks(
    blocks: Sequence[Any], x: jax.Array, inputs: Inputs, options: Sequence[Options],
    offsets: Offsets,
) -> jax.Array:  # fmt: skip
    """Run blocks in sequence, each with its options.

    A block with an offset uses the keys and values of the block that far from it.
    """
    sources = [None if offset is None else i + offset for i, offset in enumerate(offsets)]
    shared: dict[int, KeyValues] = {}
    for i, (block, call, source) in enumerate(zip(blocks, options, sources, strict=True)):
        call = call if source is None else call | {"kv": shared[source]}
        if i in sources:
            x, shared[i] = block(x, *inputs, **call, return_kv=True)
        else:
            x = block(x, *inputs, **call)
    return x


class Encoder(Stack):
    """A stack of `EncoderBlock`, with the fields of `Stack`."""

    kind = EncoderBlock

    @nn.compact
    def __call__(self, x: jax.Array, **options: Unpack[LayerOptions]) -> jax.Array:
        """Run the blocks in sequence, each with the arguments of `EncoderBlock.__call__`.

        `head_mask` may be a list with one for each block.
        """
        return self.run(x, **options)


class Decoder(Stack):
    """A stack of `DecoderBlock`, with the fields of `Stack`."""

    kind = DecoderBlock

    @nn.compact
    def __call__(
        self, x: jax.Array, memory: jax.Array | None = None, *,
        memory_mask: masks.MaskLike | None = None, memory_lengths: jax.Array | None = None,
        **options: Unpack[LayerOptions],
    ) -> jax.Array:  # fmt: skip
        """Run the blocks in sequence, each with the arguments of `DecoderBlock.__call__`.

        `head_mask` may be a list with one for each block.
        """
        return self.run(
            x, memory, memory_mask=memory_mask, memory_lengths=memory_lengths, **options
        )
