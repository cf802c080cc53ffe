"""A table of all config keys: their meaning and their valid values.

A row for each key, by its dotted name. `check` validates the values of a config file, a command
line or a run's folder.
"""

import ast
import difflib
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

import configs.dates
import configs.digits
import configs.masked
import configs.pydoc_lm
from experiments.runs import command, writers
from experiments.runs.failures import RunError
from flax_mha.kernels import choose
from flax_mha.models import blocks, feed_forward, remat
from flax_mha.positions import embedding

# The config of each task: its keys, and values that they take.
EXAMPLES: dict[str, Callable[[], ConfigDict]] = {
    "digits": configs.digits.get_config,
    "masked": configs.masked.get_config,
    "text": configs.pydoc_lm.get_config,
    "translation": configs.dates.get_config,
}
MOST = 2**31 - 1  # the largest integer that JAX has by default
SEEDS = 2**32  # how many seeds there are
DEVICES = 512  # as which a CPU may serve: beyond, the threads of XLA run out
_LARGEST = float(np.finfo(np.float32).max)


class Field(NamedTuple):
    """A row of the table.

    Attributes:
      about: the meaning of the key.
      rule: its valid values, in words.
      kind: their type, a union of types, or NoneType for any; an int counts as a float too.
      allows: the rule for a value of that type.
    """

    about: str
    rule: str
    kind: Any
    allows: Callable[[Any], bool] = lambda value: True

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of the values."""
        return typing.get_args(self.kind) or (self.kind,)

    def takes(self, value: Any) -> bool:
        """Return whether the key may have this value."""
        if self.kind is float:
            # As float32, which it is trained in.
            inside = type(value) in (int, float) and abs(value) <= _LARGEST
            return inside and self.allows(float(np.float32(value)))
        return any(kind in (type(value), type(None)) for kind in self.kinds) and self.allows(value)

    def read(self, word: str) -> Any:
        """Return the value that a word stands for, or the word itself if it stands for none."""
        try:
            if bool in self.kinds:
                return {"true": True, "1": True, "false": False, "0": False}.get(word.lower(), word)
            if self.kind in (int, float, str):
                return self.kind(word)
            return normalize("", ast.literal_eval(word))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return word


def whole(about: str, least: int = 1, most: int = MOST) -> Field:
    """Return the field of a whole number."""
    rule = f"a whole number from {least:,} to {most:,}"
    return Field(about, rule, int, lambda value: least <= value <= most)


def real(about: str, interval: str) -> Field:
    """Return the field of a number in an interval such as "[0, 1)"."""
    low, high = map(float, re.findall(r"[\d.]+", interval))

    def allows(value: float) -> bool:
        below = low < value if interval[0] == "(" else low <= value
        return below and (value < high if interval[-1] == ")" else value <= high)

    return Field(about, f"a number in {interval}", float, allows)


def one_of(about: str, *values: Any) -> Field:
    """Return the field of a value among some."""
    rule = f"one of {', '.join(map(str, values))}"
    return Field(about, rule, type(values[0]), lambda value: value in values)


def like(example: Any) -> Field:
    """Return the field of a key that the table lacks, of a config of your own: of the same type."""
    kind = type(example)
    return Field("", RULES.get(kind, f"a {kind.__name__}"), kind)


def _trackers(value: str) -> bool:
    return set(writers.named(value)) <= writers.OTHERS.keys()


def _kernel(value: str) -> bool:
    try:
        return bool(choose.parse_kernel(value))
    except ValueError:
        return False


def _remat(value: bool | str) -> bool:
    try:
        return isinstance(value, bool) or bool(remat.as_policy(tuple(value.split(","))))
    except ValueError:
        return False


RULES: dict[type, str] = {
    bool: "true or false", int: "a whole number", float: "a finite number", str: "a text",
}  # fmt: skip
_RATE = "[0, 1)"
_STACK = 1024  # layers: each is traced

TABLE = {
    "task": one_of("what is learnt", *EXAMPLES),
    "seed": whole("of the initial parameters, the order of the data, and dropout", 0, SEEDS - 1),
    "seeds": whole("models trained side by side, with seeds seed, seed + 1, …", 1, 2**16),
    "steps": whole("of training"),
    "batch_size": whole("rows of a step, over all devices"),
    "label_smoothing": real("share of the label that is spread over all classes", _RATE),
    "length": whole("tokens that the model sees at once", 1, 2**30),
    "hidden": real("share of the bytes that are to be guessed", "[0.001, 1]"),
    "log_every": whole("steps between two lines of the log; each waits for the device"),
    "evaluate_every": whole("steps between two evaluations"),
    "checkpoint_every": whole("steps between two checkpoints"),
    "keep_last": whole("checkpoints that are kept; older ones are deleted"),
    "keep_best": whole("checkpoints of the least test loss that are kept beside them", 0),
    "max_skipped": whole("steps in a row, left out as not finite, that end the run"),
    "report_to": Field(
        "where metrics go beside TensorBoard", f"empty, or some of {', '.join(writers.OTHERS)}",
        str, _trackers,
    ),
    "mesh.data": whole("devices along the batch; -1: all that are left", -1, 2**20),
    "mesh.fsdp": whole("devices along the batch that share out parameters and moments", 1, 2**20),
    "mesh.model": whole("devices along the heads and the MLP's hidden features", 1, 2**20),
    "mesh.context": whole("devices along the tokens", 1, 2**20),
    "mesh.force_host_devices": whole(
        "on a CPU: as how many devices each process's cores serve; 0: as they are", 0, DEVICES
    ),
    "data.path": Field("a file of your own; empty: the task's data", "a file, or empty", str),
    "data.tokenizer": Field(
        "of a text; empty: its bytes", "the file of a Hugging Face tokenizer, or empty", str
    ),
    "data.split": one_of("the part that is held out", "test", "validation"),
    "data.stride": whole("tokens between two windows over the held-out text", 1, 2**30),
    "model.patch_size": one_of("pixels along the side of a patch", 1, 2, 4, 8),
    "model.features": whole("of each token", 1, 2**20),
    "model.num_layers": whole("blocks", 1, _STACK),
    "model.encoder_layers": whole("blocks of the encoder", 1, _STACK),
    "model.decoder_layers": whole("blocks of the decoder", 1, _STACK),
    "model.num_heads": whole("heads of queries", 1, 2**16),
    "model.num_kv_heads": whole("heads of keys and values", 1, 2**16),
    "model.mlp_dim": whole("hidden features of the MLP", 1, 2**24),
    "model.positions": one_of("how a patch knows its place", *embedding.KINDS),
    "model.activation": one_of("of the MLP", *feed_forward.ACTIVATIONS),
    "model.norm": one_of("in front of each half of a block", *blocks.NORMS),
    "model.gated": Field("a gated MLP", RULES[bool], bool),
    "model.tied": Field("one table for tokens and logits", RULES[bool], bool),
    "model.scan": Field("layers as one loop, compiled once", RULES[bool], bool),
    "model.remat": Field(
        "compute layers again in the backward pass; names: all but these activations",
        f"true, false, or some of {', '.join(remat.NAMES)}, each perhaps after {remat.OFFLOAD}, "
        f"and {remat.PRODUCTS}, joined by commas", bool | str, _remat,
    ),
    "model.dtype": one_of("of the computation", "float32", "bfloat16", "float16"),
    "model.dropout_rate": real("of embeddings and of what blocks add", _RATE),
    "model.attention_dropout_rate": real("of the attention weights", _RATE),
    "model.kernel": Field("of attention", "auto, or a kernel of flax_mha.explain", str, _kernel),
    "augment.shift": real("pixels that an image moves by at most", "[0, 8]"),
    "augment.rotate": real("degrees that it turns by at most", "[0, 180]"),
    "augment.scale": real("relative change of its size at most", _RATE),
    "optimizer.learning_rate": real("at the end of the warm-up", "(0, 1000]"),
    "optimizer.warmup": real("share of the steps", "[0, 1]"),
    "optimizer.final": real("learning rate at the end, as a share of the highest", "[0, 1]"),
    "optimizer.b1": real("decay of AdamW's first moments", _RATE),
    "optimizer.b2": real("decay of AdamW's second moments", _RATE),
    "optimizer.weight_decay": real("of kernels only", "[0, 1000]"),
    "optimizer.clip_norm": real("norm beyond which gradients are clipped", "(0, 1000000]"),
    "optimizer.accumulate": whole("steps whose gradients are averaged for one update", 1, 2**20),
}  # fmt: skip


def of(key: str, example: Any) -> Field:
    """Return the row of a key, or a row for values like the example if the table lacks it."""
    return TABLE.get(key) or like(example)


def normalize(key: str, value: Any) -> Any:
    """Return the value of a key as its run's folder will have it: a list for a tuple."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"config.{key} must be of numbers, texts, lists and groups of them, got a "
            f"{type(value).__name__}: {command.line(error)}; give its name or its numbers"
        ) from None


def schema(task: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a task's own config by dotted key, beside more keys of yours."""
    if not isinstance(task, str) or not TABLE["task"].takes(task):
        raise RunError(f"config.task must be {TABLE['task'].rule}, got {task!r:.100}; try digits")
    return {**more, **flatten(EXAMPLES[task]().to_dict())}


def check(values: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Check that flat values have the keys of a schema, and that each is one that its key takes."""
    for key in sorted(schema.keys() | values.keys()):
        if key not in schema:
            raise RunError(f"there is no such key as {key!r:.100}")
        if key not in values:
            raise RunError(f"config.{key} is missing; give it, such as {schema[key]!r:.100}")
        field = of(key, schema[key])
        if not field.takes(values[key]):
            usual = f"; try {schema[key]!r:.100}" if field.takes(schema[key]) else ""
            raise RunError(f"config.{key} must be {field.rule}, got {values[key]!r:.100}{usual}")
    seed, seeds = values["seed"], values["seeds"]
    if seed + seeds > SEEDS:
        raise RunError(
            f"config.seed + config.seeds must be at most {SEEDS:,}, got {seed} + {seeds}; "
            f"try config.seed={SEEDS - seeds}"
        )
    steps, accumulate = values["steps"], values["optimizer.accumulate"]
    if steps % accumulate:
        raise RunError(
            f"config.steps must be a multiple of config.optimizer.accumulate={accumulate}, got "
            f"{steps}; try {-(-steps // accumulate) * accumulate}"
        )
    features, heads = values["model.features"], values["model.num_heads"]
    for key, whole, part in (
        ("features", features, heads), ("num_heads", heads, values.get("model.num_kv_heads", 1)),
    ):  # fmt: skip
        if whole % part:
            name = "num_heads" if key == "features" else "num_kv_heads"
            raise RunError(
                f"config.model.{name} must divide config.model.{key}={whole}, got {part}; "
                f"try {max(n for n in range(1, part) if whole % n == 0)}"
            )


def check_key(key: str, config: ConfigDict) -> None:
    """Check that a config has a key, or raise a RunError that names the nearest."""
    known = [*flatten(config.to_dict()), *(k for k, v in config.items() if hasattr(v, "items"))]
    if key in known:
        return

    # By the last word first: `learning_rat` means `optimizer.learning_rate`.
    def likeness(name: str) -> float:
        full = difflib.SequenceMatcher(None, key, name).ratio()
        last = difflib.SequenceMatcher(None, key.split(".")[-1], name.split(".")[-1]).ratio()
        return full + last

    nearest = max(known, key=likeness)
    raise RunError(f"the config has no key {key!r}; the nearest is {nearest!r}")


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts as one, with dotted keys."""
    return flatten_dict(dict(tree), sep=".")
