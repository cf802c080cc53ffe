"""Orders of tokens that balance the work of the devices of a ring."""

import math
from typing import Any

import jax
import numpy as np

from flax_mha.base import checks
from flax_mha.base.coordinates import Array, tiles_of, whole
from flax_mha.base.shapes import Dims

# The swaps that are compared at once, and the most table entries of all swaps: some seconds.
_SWAPS, _ENTRIES = 32, 2**29


def zigzag(length: int, devices: int) -> np.ndarray:
    """Return an order of tokens that balances causal attention over devices.

    Device i of n gets pieces i and 2n − 1 − i of 2n pieces, one of few keys and one of many.

    >>> order = sharding.zigzag(x.shape[1], 8)
    >>> y = layer.apply(variables, x[:, order], order=order)[:, np.argsort(order)]

    Args:
      length: T.
      devices: n.

    Returns:
      The positions of the tokens, int32 [T].

    Raises:
      ValueError: if T is not a positive multiple of 2n.

    Sources: ring-flash-attention (Zhu, 2024); Grattafiori et al., "The Llama 3 Herd of Models",
    2024.
    """
    checks.positive(length=length, devices=devices)
    if length % (2 * devices):
        raise ValueError(
            f"zigzag places 2 pieces on each of {devices} devices, got {length} tokens; "
            f"pad them to a multiple of {2 * devices}"
        )
    pieces = np.arange(length, dtype=np.int32).reshape(2, devices, -1)
    return np.stack([pieces[0], pieces[1, ::-1]], 1).reshape(-1)


def balanced(
    lengths: Any, devices: int, *, mask: Any = None, tile: int | None = None
) -> np.ndarray:
    """Return an order of tokens that balances attention within packed documents over a ring.

    Pieces of two devices are swapped while that reduces the time of the ring,

        Σₛ (Σᵢ Wᵢₛ⁸)^(1/8)  ≈  Σₛ maxᵢ Wᵢₛ

    where Wᵢₛ counts the tiles, not empty, of queries of device i and keys of device i − s.

    >>> lengths = [700, 1000, 348]
    >>> order = sharding.balanced(lengths, 8)
    >>> layer = MultiHeadAttention(8, mask=masks.Causal() & masks.Documents(lengths))

    Args:
      lengths: int [documents], the tokens of each document, T in all, with padding as a document,
        or [rows, documents], filled with 0, for rows that share the order.
      devices: n, the number of devices of the ring.
      mask: a static mask within documents, the same in all rows (default: causal).
      tile: the tokens of a piece (default: 512, 256 or 128, by the length).

    Returns:
      The positions of the tokens, int32 [T].

    Raises:
      ValueError: if T is not the same positive multiple of n·tile in all rows.
    """
    checks.optional(devices=devices, tile=tile)
    rows = np.atleast_2d(checks.integers("lengths", lengths))
    length, *others = {*rows.sum(-1).tolist()}
    tile = tile or piece_size(length // devices, devices)
    if others or not length or length % (devices * tile):
        raise ValueError(
            f"each row of lengths must sum to the same multiple of devices · tile = "
            f"{devices * tile}, got {[length, *others]}; add a document of padding, or give a "
            f"smaller tile"
        )
    pieces = np.argsort(_deal(_count_work(rows, mask, tile), devices), kind="stable")
    tokens = np.arange(length, dtype=np.int32).reshape(-1, tile)
    return tokens[pieces].reshape(-1)


def piece_size(length: int, devices: int, positions: Array | None = None) -> int:
    """Return the tokens of a piece of `length` tokens a device, given positions if static."""
    if positions is None or isinstance(positions, jax.Array):
        least = max(16, 4 * devices)
        return next((s for s in (512, 256) if length % s == 0 and least * s <= length), 128)
    steps = np.diff(np.asarray(positions)[..., 0]).reshape(-1, positions.shape[-2] - 1)
    starts = np.flatnonzero((steps != 1).any(0)) + 1
    return max(math.gcd(length, *starts.tolist()), 128)


def _count_work(rows: np.ndarray, mask: Any, tile: int) -> np.ndarray:
    """Return how many rows may attend in each tile, float32 [pieces, pieces]."""
    if not (mask is None or hasattr(mask, "bind")):
        got = checks.describe(mask)
        raise TypeError(f"mask must be a mask of flax_mha.masks, got {got}; give masks.Causal()")
    length = int(rows[0].sum())
    dims = Dims((), length, length, 1, 1, 1, 1)
    tiles = tiles_of(*whole(dims)[2:], tile, tile)
    states = tiles.k_min <= tiles.q_max if mask is None else mask.bind(dims).tiles(tiles)
    visible = np.asarray(states) > 0
    work = np.zeros((length // tile,) * 2, np.float32)
    for row in rows:
        documents = np.repeat(np.arange(len(row)), row)
        first, last = documents[::tile], documents[tile - 1 :: tile]
        overlap = (first[:, None] <= last) & (first <= last[:, None])
        work += np.reshape(visible & overlap, work.shape)
    return work


def _deal(work: np.ndarray, n: int) -> np.ndarray:
    """Return the device of each piece, int [pieces], with equally many on each device."""
    m, devices = len(work), np.arange(n)
    device = np.arange(m) % n
    if n == 1:
        return device
    # Powers of the mean 1 do not overflow.
    work = work * (n * n / max(float(work.sum()), 1.0))
    one_hot = np.eye(n, dtype=np.float32)
    by_query, by_key = work @ one_hot[device], work.T @ one_hot[device]
    # The work of the queries of each device on the keys of each other one.
    table = one_hot[device].T @ by_query
    keys_of_step = (devices - devices[:, None]) % n

    def time(table: np.ndarray) -> Any:
        steps = np.square(np.square(np.square(table[..., devices, keys_of_step])))
        return (steps.sum(-1) ** 0.125).sum(-1)

    rng, best = np.random.default_rng(0), time(table)
    for _ in range(min(16 * m, _ENTRIES // (_SWAPS * n * n))):
        a, *others = rng.choice(m, min(_SWAPS, m), replace=False)
        b = np.array(others)
        # Swap a and each b: the changes of the rows and columns of their devices.
        change = one_hot[device[a]] - one_hot[device[b]]
        both = work[b, b] + work[a, a] - work[a, b] - work[b, a]
        by_row = by_query[b] - by_query[a] + both[:, None] * change
        by_column = by_key[b] - by_key[a]
        tables = table + change[:, :, None] * by_row[:, None]
        tables += by_column[:, :, None] * change[:, None]
        times = time(tables)
        i = times.argmin()
        if times[i] < best * (1 - 1e-6):
            best, table, b = times[i], tables[i], b[i]
            by_query += np.outer(work[:, b] - work[:, a], change[i])
            by_key += np.outer(work[b] - work[a], change[i])
            device[[a, b]] = device[[b, a]]
    return device
