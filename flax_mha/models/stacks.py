"""Stacks of blocks."""

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.cache.sources import Shared
from flax_mha.layer.settings import check_module
from flax_mha.linen import LayerOptions, MultiHeadAttention, with_parameters
from flax_mha.models.blocks import Block, DecoderBlock, EncoderBlock
from flax_mha.scores import ScoreMod, as_scores
from flax_mha.sharding import rules

Inputs: TypeAlias = tuple[jax.Array, ...]
Options: TypeAlias = dict[str, Any]
Sources: TypeAlias = Sequence[int | None]


class Stack(nn.Module):
    """A stack of blocks, with a norm at the end unless they are post-norm.

    Attributes:
      num_layers: how many blocks.
      block: the block that each is a copy of, with parameters of its own; or several in turn, such
        as five with a window and one without, from the first on again after the last.
      scan: run them by `nn.scan`, compiled once instead of num_layers times; the parameters are
        then stacked on a leading axis under `layers` instead of `layers_0`, `layers_1`, … Of
        several blocks one step has them all, as `block_0`, `block_1`, …; layers that are left over
        after the last step stand beside it, under their number.
      scores: functions of the scores of all its layers of self-attention, after their own; what
        they learn is shared, such as the table of `RelativeBias()` in T5.
      input_norm: whether there is a norm before the first block (BERT, CLIP).
      final_norm: whether there is one after the last (default: unless the blocks are post-norm).
      kv_from: for each layer, the number of an earlier one whose keys and values its self-attention
        attends to, or None for its own, such as (None, None, 0, 1). Those that take have no
        parameters for keys and values, and no cache. Under `scan` a layer takes from one of the
        same step (default: all have their own).

    Sources of `kv_from`: Brandon et al., "Reducing Transformer Key-Value Cache Size with
    Cross-Layer Attention", 2024; Sun et al., "You Only Cache Once", 2024.
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
        """Make tuples of lists: they have a hash, by which compiled programs tell models apart."""
        for name in ("block", "kv_from"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, tuple(getattr(self, name)))
        super().__post_init__()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks in turn."""
        blocks = self.block if isinstance(self.block, tuple) else (self.block,)
        for block in blocks:
            check_module("block", block, self.kind)
            check_module("attention", block.attention, MultiHeadAttention)
        if not blocks:
            raise ValueError("block must be a block, or some of them in turn, got none")
        return blocks

    @property
    def first(self) -> Block:
        """The first block, whose dtypes are those of all."""
        return self.blocks[0]

    @property
    def decodes(self) -> bool:
        """True if its attention layers keep a cache."""
        return bool(getattr(getattr(self.first, "attention", None), "decode", False))

    @nn.nowrap
    def run(self, x: jax.Array, *others: jax.Array | None, **call: Any) -> jax.Array:
        """Run the blocks one after another, each with the same other inputs and arguments."""
        with rules.undivided_tokens(self.decodes):
            return self._run(x, *others, **call)

    @nn.nowrap
    def _run(self, x: jax.Array, *others: jax.Array | None, **call: Any) -> jax.Array:
        checks.fields(self)
        shapes.check_features("x", x)
        checks.positive(num_layers=self.num_layers)
        # A block of a user's own need not take what nobody gives.
        inputs = tuple(x for x in others if x is not None)
        call = {name: x for name, x in call.items() if x is not None}
        blocks = self.blocks
        x = sharding.constrain(x, ("batch", "norm_length", None))
        if self.input_norm:
            x = self.first.make_norm("input_norm", self)(x)
        if self.scores:
            scores = with_parameters(self, self.scores, self.first.attention, x.shape[-1])
            call["scores"] = scores + as_scores(call.get("scores", ()))
        by_layer, sources = self._by_layer(call), self._sources(call)
        rotates = [block.attention.rotary is not None for block in blocks]
        # Positions are for those that rotate: some models rotate in some layers only.
        unturned = {name: x for name, x in call.items() if name != "positions"}
        by_block = [call if turns or not any(rotates) else unturned for turns in rotates]
        steps = self.num_layers // len(blocks) if self.scan else 0
        done = steps * len(blocks)
        if steps:
            x = self._scan(x, inputs, by_block, by_layer[:done], sources[: len(blocks)])
        numbers = range(done, self.num_layers)
        x = _run_blocks(
            [blocks[i % len(blocks)].copy(name=f"layers_{i}") for i in numbers], x, inputs,
            [by_block[i % len(blocks)] | by_layer[i] for i in numbers],
            [None if source is None else source - done for source in sources[done:]],
        )  # fmt: skip
        final = not self.first.post_norm if self.final_norm is None else self.final_norm
        return self.first.make_norm("norm", self)(x) if final else x

    @nn.nowrap
    def _scan(
        self, x: jax.Array, inputs: Inputs, by_block: Sequence[Options],
        by_layer: Sequence[Options], sources: Sources,
    ) -> jax.Array:  # fmt: skip
        """Run as many steps as there are layers for, each with all blocks."""
        blocks = self.blocks

        def step(
            module: Any, x: jax.Array, inputs: Inputs, by_layer: Sequence[Options]
        ) -> tuple[jax.Array, None]:
            options = [one | other for one, other in zip(by_block, by_layer, strict=True)]
            if isinstance(module, _Group):
                return module(x, inputs, options, sources), None
            return _run_blocks([module], x, inputs, options, sources), None

        scanned = nn.scan(
            step,
            variable_axes={"params": 0, "intermediates": 0, "cache": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, 0),
            length=len(by_layer) // len(blocks),
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        group = _Group(blocks, name="layers") if len(blocks) > 1 else self.first.copy(name="layers")
        by_step = [by_layer[i :: len(blocks)] for i in range(len(blocks))]
        stacked = [jax.tree.map(lambda *x: jnp.stack(x), *options) for options in by_step]
        # A scan's carry has one dtype, that of the blocks.
        x = x.astype(_residual_dtype(self.first, x.dtype))
        return scanned(group, x, inputs, stacked)[0]

    @nn.nowrap
    def _sources(self, call: dict[str, Any]) -> tuple[int | None, ...]:
        """Return for each layer the one whose keys and values it takes: `kv_from`, checked."""
        if self.kv_from is None:
            return (None,) * self.num_layers
        kv_from = self.kv_from
        if not isinstance(kv_from, tuple) or len(kv_from) != self.num_layers:
            raise ValueError(
                f"kv_from must be a tuple of a layer's number or None for each of the "
                f"{self.num_layers} layers, got {kv_from!r}"
            )
        if call.get("kv") is not None:
            raise ValueError(
                f"kv= goes to all layers, and kv_from={kv_from} says where each has them from; "
                f"give one of the two"
            )
        for i, source in enumerate(kv_from):
            if source is None:
                continue
            checks.integer(f"kv_from[{i}]", source)
            legal = [n for n in range(i) if kv_from[n] is None]
            if source not in legal:
                rule = f"an earlier layer with keys and values of its own, one of {legal}"
                rule = rule if legal else "None, for no layer stands before the first"
                raise ValueError(f"kv_from[{i}] must be {rule}, got {source} in {kv_from}")
        several = len(self.blocks)
        starts = [i - i % several for i in range(self.num_layers)]
        first = [kv_from[i - start] for i, start in enumerate(starts)]
        same = [None if n is None else n + start for n, start in zip(first, starts, strict=True)]
        if self.scan and kv_from != tuple(same):
            raise ValueError(
                f"under scan a layer can take keys and values only from a layer of the same step "
                f"(each has {several} here), and in every step alike: by its beginning kv_from "
                f"would be {tuple(same)}, got {kv_from}; give block= more blocks in turn, or "
                f"scan=False"
            )
        return kv_from

    @nn.nowrap
    def _by_layer(self, call: Options) -> list[Options]:
        """Take the arguments that differ by layer out of those of the call, and return them.

        They are a key for dropout, or all would drop the same weights; and the head_mask, if it is
        a list.
        """
        by_layer: list[Options] = [{} for _ in range(self.num_layers)]
        if call.get("dropout_rng") is not None:
            key = checks.key("dropout_rng", call.pop("dropout_rng"))
            for options, part in zip(by_layer, jax.random.split(key, self.num_layers), strict=True):
                options["dropout_rng"] = part
        head_masks = call.get("head_mask")
        if not isinstance(head_masks, list | tuple):
            return by_layer
        if len(head_masks) != self.num_layers:
            raise ValueError(
                f"head_mask must be one array, or a list of one for each of the {self.num_layers} "
                f"blocks, got {len(head_masks)}; give jnp.ones(N) for blocks whose heads all stay"
            )
        del call["head_mask"]
        for options, mask in zip(by_layer, head_masks, strict=True):
            options["head_mask"] = jnp.asarray(mask)
        return by_layer


class _Group(nn.Module):
    """Several blocks as one step of a scan."""

    blocks: Sequence[Block]

    @nn.compact
    def __call__(
        self, x: jax.Array, inputs: Inputs, options: Sequence[Options], sources: Sources
    ) -> jax.Array:
        blocks = [block.copy(name=f"block_{n}") for n, block in enumerate(self.blocks)]
        return _run_blocks(blocks, x, inputs, options, sources)


def _run_blocks(
    blocks: Sequence[Any], x: jax.Array, inputs: Inputs, options: Sequence[Options],
    sources: Sources,
) -> jax.Array:  # fmt: skip
    """Run blocks one after another, each with its options, and return the output of the last.

    A block with a source attends to the keys and values of the block of that number.
    """
    kept: dict[int, Shared] = {}
    for i, (block, call, source) in enumerate(zip(blocks, options, sources, strict=True)):
        call = call if source is None else call | {"kv": kept[source]}
        if i in sources:
            x, kept[i] = block(x, *inputs, **call, return_kv=True)
        else:
            x = block(x, *inputs, **call)
    return x


class Encoder(Stack):
    """A stack of `EncoderBlock`: fields of `Stack`."""

    kind = EncoderBlock

    @nn.compact
    def __call__(self, x: jax.Array, **options: Unpack[LayerOptions]) -> jax.Array:
        """Map [*B, T, D] to [*B, T, D]; options as for `EncoderBlock`, the same in each.

        Of `head_mask` there may be a list, with one for each block.
        """
        return self.run(x, **options)


class Decoder(Stack):
    """A stack of `DecoderBlock`: fields of `Stack`."""

    kind = DecoderBlock

    @nn.compact
    def __call__(
        self, x: jax.Array, memory: jax.Array | None = None, *,
        memory_mask: masks.MaskLike | None = None, memory_lengths: jax.Array | None = None,
        **options: Unpack[LayerOptions],
    ) -> jax.Array:  # fmt: skip
        """Map [*B, T, D] to [*B, T, D]; arguments as for `DecoderBlock`, the same in each.

        Of `head_mask` there may be a list, with one for each block.
        """
        return self.run(
            x, memory, memory_mask=memory_mask, memory_lengths=memory_lengths, **options
        )


def _residual_dtype(block: Block, dtype: Dtype) -> Dtype:
    """Return the dtype of a block's output for an input of that dtype."""
    layer = block.attention
    computed = layer.dtype or jnp.promote_types(dtype, layer.param_dtype)
    return computed if block.post_norm else jnp.promote_types(dtype, computed)
