"""Stacks of blocks."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Unpack

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
        """A list would have no hash, by which models are told apart where they are compiled."""
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
        """The first of them, whose dtypes are those of all."""
        return self.blocks[0]

    @property
    def decodes(self) -> bool:
        """Whether its attention layers keep a cache."""
        return bool(getattr(getattr(self.first, "attention", None), "decode", False))

    @nn.nowrap
    def run(self, x: jax.Array, *others: jax.Array | None, **call: Any) -> jax.Array:
        """The blocks one after another, each with the same other inputs and arguments."""
        with rules.undivided_tokens(self.decodes):
            return self._run(x, *others, **call)

    @nn.nowrap
    def _run(self, x: jax.Array, *others: jax.Array | None, **call: Any) -> jax.Array:
        checks.fields(self)
        shapes.check_features("x", x)
        checks.positive(num_layers=self.num_layers)
        # A block of a user's own need not take what nobody gives.
        others = tuple(x for x in others if x is not None)
        call = {name: x for name, x in call.items() if x is not None}
        blocks = self.blocks
        x = sharding.constrain(x, ("batch", "norm_length", None))
        if self.input_norm:
            x = self.first.make_norm("input_norm", self)(x)
        if self.scores:
            own = with_parameters(self, self.scores, self.first.attention, x.shape[-1])
            call["scores"] = own + as_scores(call.get("scores", ()))
        of_each, sources = self._of_each(call), self._sources(call)
        steps = self.num_layers // len(blocks) if self.scan else 0
        rotates = any(block.attention.rotary is not None for block in blocks)

        def run_one(block: Any, x: jax.Array, others: Any, own: dict[str, Any]) -> Any:
            given = dict(call)
            if rotates and block.attention.rotary is None:
                # They are for the others: some models rotate in some layers only.
                given.pop("positions", None)
            return block(x, *others, **given, **own)

        def run_all(layers: Any, x: jax.Array, others: Any) -> jax.Array:
            kept: dict[int, Shared] = {}
            for i, block, own in layers:
                own = own if sources[i] is None else own | {"kv": kept[sources[i]]}
                if i in sources:
                    x, kept[i] = run_one(block, x, others, own | {"return_kv": True})
                else:
                    x = run_one(block, x, others, own)
            return x

        def step(module: Any, x: jax.Array, others: Any, own: Any) -> tuple[jax.Array, None]:
            if isinstance(module, _Group):
                return module(run_all, x, others, own), None
            return run_one(module, x, others, own[0]), None

        if steps:
            # A scan's carry has one dtype, that of the blocks.
            x = x.astype(_residual_dtype(self.first, x.dtype))
            scanned = nn.scan(
                step,
                variable_axes={"params": 0, "intermediates": 0, "cache": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, 0),
                length=steps,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            module = (_Group(blocks) if len(blocks) > 1 else self.first).copy(name="layers")
            groups = [of_each[i * len(blocks) :][: len(blocks)] for i in range(steps)]
            x, _ = scanned(module, x, others, jax.tree.map(lambda *x: jnp.stack(x), *groups))
        left = range(steps * len(blocks), self.num_layers)
        named = ((i, blocks[i % len(blocks)].copy(name=f"layers_{i}"), of_each[i]) for i in left)
        x = run_all(named, x, others)
        final = not self.first.post_norm if self.final_norm is None else self.final_norm
        return self.first.make_norm("norm", self)(x) if final else x

    @nn.nowrap
    def _sources(self, call: dict[str, Any]) -> tuple[int | None, ...]:
        """`kv_from`, if it fits: the layer whose keys and values each layer takes, or None."""
        if self.kv_from is None:
            return (None,) * self.num_layers
        found = self.kv_from
        if not isinstance(found, tuple) or len(found) != self.num_layers:
            raise ValueError(
                f"kv_from must be a tuple of a layer's number or None for each of the "
                f"{self.num_layers} layers, got {found!r}"
            )
        if call.get("kv") is not None:
            raise ValueError(
                f"kv= goes to all layers, and kv_from={found} says where each has them from; give "
                f"one of the two"
            )
        for i, source in enumerate(found):
            if source is None:
                continue
            checks.integer(f"kv_from[{i}]", source)
            legal = [n for n in range(i) if found[n] is None]
            if source not in legal:
                rule = f"an earlier layer with keys and values of its own, one of {legal}"
                rule = rule if legal else "None, for no layer stands before the first"
                raise ValueError(f"kv_from[{i}] must be {rule}, got {source} in {found}")
        several = len(self.blocks)
        starts = [i - i % several for i in range(self.num_layers)]
        first = [found[i - start] for i, start in enumerate(starts)]
        same = [None if n is None else n + start for n, start in zip(first, starts, strict=True)]
        if self.scan and found != tuple(same):
            raise ValueError(
                f"under scan a layer can take keys and values only from a layer of the same step "
                f"(each has {several} here), and in every step alike: by its beginning kv_from "
                f"would be {tuple(same)}, got {found}; give block= more blocks in turn, or "
                f"scan=False"
            )
        return found

    @nn.nowrap
    def _of_each(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """What each block is given of its own, taken out of the arguments that all share.

        A key for dropout, or all would drop the same weights; and its head_mask, of a list of them.
        """
        own: list[dict[str, Any]] = [{} for _ in range(self.num_layers)]
        if call.get("dropout_rng") is not None:
            key = checks.key("dropout_rng", call.pop("dropout_rng"))
            for each, part in zip(own, jax.random.split(key, self.num_layers), strict=True):
                each["dropout_rng"] = part
        given = call.get("head_mask")
        if not isinstance(given, list | tuple):
            return own
        if len(given) != self.num_layers:
            raise ValueError(
                f"head_mask must be one array, or a list of one for each of the {self.num_layers} "
                f"blocks, got {len(given)}; give jnp.ones(N) for blocks whose heads all stay"
            )
        del call["head_mask"]
        return [each | {"head_mask": jnp.asarray(x)} for each, x in zip(own, given, strict=True)]


class _Group(nn.Module):
    """Several blocks as one step of a scan."""

    blocks: Sequence[Block]

    @nn.compact
    def __call__(
        self, run: Callable[..., jax.Array], x: jax.Array, others: Any, own: Sequence[Any]
    ) -> jax.Array:
        named = (block.copy(name=f"block_{n}") for n, block in enumerate(self.blocks))
        return run(zip(itertools.count(), named, own), x, others)


class Encoder(Stack):
    """A stack of `EncoderBlock`: fields of `Stack`."""

    kind = EncoderBlock

    @nn.compact
    def __call__(self, x: jax.Array, **options: Unpack[LayerOptions]) -> jax.Array:
        """Maps [*B, T, D] to [*B, T, D]; options as for `EncoderBlock`, the same in each.

        Of `head_mask` there may be a list, with one for each block.
        """
        return self.run(x, **options)


class Decoder(Stack):
    """A stack of `DecoderBlock`: fields of `Stack`."""

    kind = DecoderBlock

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        memory_mask: masks.MaskLike | None = None,
        memory_lengths: jax.Array | None = None,
        **options: Unpack[LayerOptions],
    ) -> jax.Array:
        """Maps [*B, T, D] to [*B, T, D]; arguments as for `DecoderBlock`, the same in each.

        Of `head_mask` there may be a list, with one for each block.
        """
        return self.run(
            x, memory, memory_mask=memory_mask, memory_lengths=memory_lengths, **options
        )


def _residual_dtype(block: Block, given: Dtype) -> Dtype:
    """What a block makes of an input of the given dtype."""
    layer = block.attention
    computed = layer.dtype or jnp.promote_types(given, layer.param_dtype)
    return computed if block.post_norm else jnp.promote_types(given, computed)
