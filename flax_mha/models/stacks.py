"""Stacks of blocks."""

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha import sharding
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


class Stack(nn.Module):
    """A stack of blocks, with a final norm unless they are post-norm.

    Attributes:
      num_layers: the number of layers.
      block: the block that each layer copies, or several blocks to alternate, such as five with a
        window and one without.
      scan: True to run the layers by `nn.scan`, compiled once. Their parameters are stacked on a
        leading axis under `layers` instead of `layers_0`, … One step has all alternating blocks,
        `block_0`, `block_1`, …; layers that fill no step keep their name `layers_i`.
      scores: score functions of all self-attention layers, after their own, with shared
        parameters, such as the table of `RelativeBias()` in T5.
      input_norm: True for a norm before the first block (BERT, CLIP).
      final_norm: True for a norm after the last block (default: unless the blocks are post-norm).
      kv_from: for each layer, None or the index of an earlier layer whose keys and values its
        self-attention uses, such as (None, None, 0, 1). A layer with an index has no parameters
        for keys and values, and no cache. Not for `scan` (default: None for all).

    Source: Sun et al., "You Only Cache Once", 2024 (kv_from).
    """

    num_layers: int
    block: Block | Sequence[Block]
    scan: bool = False
    scores: Sequence[ScoreMod] = ()
    input_norm: bool = False
    final_norm: bool | None = None
    kv_from: Sequence[int | None] | None = None

    kind: ClassVar[type[Block]] = Block

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The alternating blocks."""
        blocks = tuple(self.block) if isinstance(self.block, Sequence) else (self.block,)
        for block in blocks:
            check_module("block", block, self.kind)
            check_module("attention", block.attention, MultiHeadAttention)
        return blocks

    @property
    def places(self) -> list[tuple[tuple[str, ...], int, int | None]]:
        """The path of each layer's variables, the index of its block, and its step of the scan.

        A path is ("layers_0",), or in a scan ("layers",) or ("layers", "block_1").
        """
        size = len(self.blocks)
        scanned = self.num_layers // size * size if self.scan else 0
        path = ("layers",) if size == 1 else ("layers", "block_{}")
        return [
            (tuple(name.format(i % size) for name in path), i % size, i // size)
            if i < scanned else ((f"layers_{i}",), i % size, None)
            for i in range(self.num_layers)
        ]  # fmt: skip

    @property
    def first(self) -> Block:
        """The first block, whose dtypes the stack uses."""
        return self.blocks[0]

    @property
    def decodes(self) -> bool:
        """True if its attention layers keep a cache."""
        return bool(self.first.attention.decode)

    @nn.nowrap
    def run(self, x: jax.Array, *others: jax.Array | None, **call: Any) -> jax.Array:
        """Run the blocks in sequence, each with the same arguments."""
        with rules.undivided_tokens(self.decodes):
            checks.fields(self)
            shapes.check_features("x", x)
            checks.positive(num_layers=self.num_layers)
            # User-defined blocks need not take arguments that are None.
            inputs = tuple(x for x in others if x is not None)
            call = {name: x for name, x in call.items() if x is not None}
            x = sharding.constrain(x, ("batch", "norm_length", None))
            x = tap_of(self, self.first.attention.capture).last("embed", x)
            if self.input_norm:
                x = self.first.make_norm("input_norm", self)(x)
            if self.scores:
                scores = with_parameters(self, self.scores, self.first.attention, x.shape[-1])
                call["scores"] = scores + as_scores(call.get("scores", ()))
            by_layer, sources = self._by_layer(call), self._sources(call)
            rotates = [block.attention.rotary is not None for block in self.blocks]
            # If only some layers rotate, the others get no positions.
            unrotated = {name: x for name, x in call.items() if name != "positions"}
            by_block = [call if has_rope or not any(rotates) else unrotated for has_rope in rotates]
            scanned = sum(step is not None for *_, step in self.places)
            if scanned:
                x = self._scan(x, inputs, by_block, by_layer[:scanned])
            shared: dict[int, KeyValues] = {}
            for i, ((name, *_), n, _) in list(enumerate(self.places))[scanned:]:
                block: Any = self.blocks[n].copy(name=name)
                options = by_block[n] | by_layer[i]
                if (source := sources[i]) is not None:
                    options["kv"] = shared[source]
                if i in sources:
                    x, shared[i] = block(x, *inputs, **options, return_kv=True)
                else:
                    x = block(x, *inputs, **options)
            final = not self.first.post_norm if self.final_norm is None else self.final_norm
            return self.first.make_norm("norm", self)(x) if final else x

    @nn.nowrap
    def _scan(
        self, x: jax.Array, inputs: Inputs, by_block: Sequence[Options],
        by_layer: Sequence[Options],
    ) -> jax.Array:  # fmt: skip
        """Run a scan whose steps have all blocks."""
        blocks = self.blocks
        policies = [not self.decodes and block.remat for block in blocks]
        caches = self.variables.get("cache", {}).get("layers")
        # Carry the caches of all layers: as inputs and outputs of the scan they would be copied.
        # But a call with an encoder's output makes memories, perhaps of another size.
        in_place = not inputs and caches is not None

        def run(module: Any, x: jax.Array, by_layer: Sequence[Options]) -> tuple[jax.Array, None]:
            options = [x | y for x, y in zip(by_block, by_layer, strict=True)]
            if isinstance(module, _Group):
                return module(x, inputs, options, policies), None
            return _run_in_scan(module, x, inputs, options[0], policies[0]), None

        def step(module: Any, x: jax.Array, by_layer: Any, layer: jax.Array) -> Any:
            # The variables of each module among the fields, in the order in which Flax maps them.
            stacks: list[Any] = []

            def of_layer(variables: Any) -> Any:
                stacks.append(variables)
                return collection.of_layer(variables, layer)

            def to_stack(variables: Any) -> Any:
                return collection.to_stack(variables, stacks.pop(0), layer)

            mapped = nn.map_variables(run, "cache", of_layer, to_stack, mutable=True)
            return (mapped if in_place else run)(module, x, by_layer)

        axes: dict[Any, Any] = {"params": 0, "intermediates": 0, COLLECTION: 0}
        scanned = nn.scan(
            step,
            variable_axes=axes if in_place else axes | {"cache": 0},
            variable_carry="cache" if in_place else False,
            split_rngs={"params": True, "dropout": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        if len(blocks) > 1:
            group: nn.Module = _Group(blocks, name="layers")
        else:
            group = blocks[0].copy(name="layers", remat=False)
        by_step = [by_layer[i :: len(blocks)] for i in range(len(blocks))]
        stacked = [jax.tree.map(lambda *x: jnp.stack(x), *options) for options in by_step]
        # The carry of a scan must keep its dtype.
        layer = self.first.attention
        computed = layer.dtype or jnp.promote_types(x.dtype, layer.param_dtype)
        x = x.astype(computed if self.first.post_norm else jnp.promote_types(x.dtype, computed))
        return scanned(group, x, stacked, jnp.arange(len(by_step[0]), dtype=jnp.int32))[0]

    @nn.nowrap
    def _sources(self, call: Options) -> Sequence[int | None]:
        sources = self.kv_from
        if sources is None:
            return (None,) * self.num_layers
        if self.scan or call.get("kv") is not None:
            raise ValueError("kv_from cannot be used with scan=True or kv=; leave one of them out")
        has_keys = {i for i, source in enumerate(sources) if source is None}
        is_valid = all(x is None or x in has_keys & {*range(i)} for i, x in enumerate(sources))
        if not is_valid or len(sources) != self.num_layers:
            raise ValueError(
                f"kv_from must have for each of the {self.num_layers} layers None, or the index of "
                f"an earlier layer with None, got {sources}; change it"
            )
        return sources

    @nn.nowrap
    def _by_layer(self, call: Options) -> list[Options]:
        """Remove dropout keys and a list of head masks from a call, and return them by layer."""
        differing: dict[str, Any] = {}
        if "dropout_rng" in call:
            key = checks.key("dropout_rng", call.pop("dropout_rng"))
            differing["dropout_rng"] = jax.random.split(key, self.num_layers)
        if isinstance(call.get("head_mask"), list | tuple):
            differing["head_mask"] = [*map(jnp.asarray, call.pop("head_mask"))]
            if len(differing["head_mask"]) != self.num_layers:
                raise ValueError(
                    f"head_mask must be one array, or a list of one for each of the "
                    f"{self.num_layers} blocks, got {len(differing['head_mask'])}; give "
                    f"jnp.ones(N) for blocks that keep all heads"
                )
        return [{name: xs[i] for name, xs in differing.items()} for i in range(self.num_layers)]


class _Group(nn.Module):
    """The alternating blocks, as one step of a scan."""

    blocks: Sequence[Block]

    @nn.compact
    def __call__(
        self, x: jax.Array, inputs: Inputs, options: Sequence[Options], policies: Sequence[Any]
    ) -> jax.Array:
        for n, block in enumerate(self.blocks):
            layer = block.copy(name=f"block_{n}", remat=False)
            x = _run_in_scan(layer, x, inputs, options[n], policies[n])
        return x


def _run_in_scan(
    block: Any, x: jax.Array, inputs: Inputs, options: Options, policy: remat.Remat
) -> jax.Array:
    run = remat.apply(policy, lambda block, x: block(x, *inputs, **options), in_scan=True)
    return run(block, x)


class Encoder(Stack):
    """A stack of `EncoderBlock`, with the fields of `Stack`."""

    kind = EncoderBlock

    @nn.compact
    def __call__(self, x: jax.Array, **options: Unpack[LayerOptions]) -> jax.Array:
        """Run the blocks, each with these arguments. A `head_mask` may be a list by block."""
        return self.run(x, **options)


class Decoder(Stack):
    """A stack of `DecoderBlock`, with the fields of `Stack`."""

    kind = DecoderBlock

    @nn.compact
    def __call__(
        self, x: jax.Array, memory: jax.Array | None = None, *,
        memory_lengths: jax.Array | None = None, **options: Unpack[LayerOptions],
    ) -> jax.Array:  # fmt: skip
        """Run the blocks, each with these arguments. A `head_mask` may be a list by block."""
        return self.run(x, memory, memory_lengths=memory_lengths, **options)
