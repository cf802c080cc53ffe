"""The minimum time of a step: the time of each resource of a chip for its share.

    step ≥ max(operations / peak, bytes / memory bandwidth, Σ collectives on their links)

The network's share adds up one collective after another. Within each, all usable links work. Real
steps overlap less and run matmuls below the peak: a layout that is slightly better here may be
worse in practice.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.common.counts.chips import CHIPS, GPUS, Chip
from experiments.common.devices import count_slices
from experiments.plan.collectives import Collective
from experiments.plan.compiled import Compiled
from experiments.plan.gpus import HOST


class Times(NamedTuple):
    """The seconds of a step, by resource."""

    compute: float
    memory: float
    network: float

    @property
    def step(self) -> float:
        """The minimum time of a step."""
        return max(self)

    @property
    def binds(self) -> str:
        """The resource that limits the step."""
        return self._fields[self.index(self.step)]


def times(found: Compiled) -> Times | None:
    """Return the times of a step, or None if the table of chips lacks the device."""
    links = network(found.devices)
    if links is None:
        return None
    return Times(
        links.cores * found.flops / links.chip.flops,
        links.cores * found.moved / links.chip.bandwidth,
        float(sum(one.times * links.seconds(one) for one in found.sent)),
    )


class Machines(NamedTuple):
    """GPUs and the links between them."""

    chip: Chip
    hosts: np.ndarray  # the machine of each device of the mesh, in its order
    cores: int = 1  # devices per GPU

    def by_link(self, one: Collective) -> dict[str, float]:
        """Return the bytes that each device sends over each kind of link in one run."""
        across = one.across(self.hosts)
        alone = len(set(self.hosts[one.groups[0]])) == one.groups.shape[1]
        inside = 0.0 if across and alone else one.sent
        return {link: x for link, x in (("NVLink", inside), ("InfiniBand", across)) if x}

    def seconds(self, one: Collective) -> float:
        """Return the minimum time of one run of a collective.

        Every device has its own link to its machine's switch and its own to the network, and sends
        over both at the same time.
        """
        speed = {"NVLink": self.chip.link, "InfiniBand": self.chip.network}
        return max((x / speed[link] for link, x in self.by_link(one).items()), default=0.0)


class Torus(NamedTuple):
    """TPU chips and the links between them."""

    chip: Chip
    cores: int  # devices per chip
    places: np.ndarray  # coordinates of each device of the mesh, in its order, [devices, axes]
    sizes: tuple[int, ...]  # of the torus along each axis
    slices: int = 1  # such tori, which the devices fill one after another

    def by_link(self, one: Collective) -> dict[str, float]:
        """Return the bytes that each device sends over each kind of link in one run."""
        across = one.across(np.arange(len(self.places)) * self.slices // len(self.places))
        return {"DCN": across} if across else {"ICI": one.sent}

    def seconds(self, one: Collective) -> float:
        """Return the minimum time of one run of a collective.

        | kind | time |
        |---|---|
        | any, between slices | bytes that a chip sends / its bandwidth of the network |
        | permutation | bytes · hops of the longest path / link |
        | all-to-all | the maximum of the row below and half of the bytes through an axis's middle |
        | others | bytes that a chip sends / its links along the axes that the group spans |

        Per chip an axis has two links if it is a ring, and one if it is a line, because of the
        chips at its ends. If a group takes every second chip of an axis, another group takes the
        other chips, and both share the same links.
        """
        if across := self.by_link(one).get("DCN"):
            return self.cores * across / self.chip.network
        if one.kind == "collective-permute":
            return one.bytes * self._hops(one.groups) / self.chip.link
        members = self.places[one.groups[0]]
        group = np.unique(members, axis=0)
        if len(group) == 1:
            return 0.0  # between the cores of a chip
        axes = [self._along(axis, sorted(set(group[:, axis]))) for axis in range(len(self.sizes))]
        sharing = math.prod(covered for covered, _ in axes) / len(group)
        # The cores of a chip share its links; in one group they send common data once.
        sent = sharing * one.sent * self.cores * len(group) / len(members)
        sending = sent / (sum(links for _, links in axes) * self.chip.link)
        if not one.kind.endswith("all-to-all"):
            return sending
        middle = max(covered / (4 * links) for covered, links in axes if links)
        return max(sending, sharing * middle * one.bytes / self.chip.link)

    def _along(self, axis: int, places: list[int]) -> tuple[int, int]:
        """Return the extent of an axis that a group covers, and a chip's number of links there.

        The axis is a ring for a group that goes all around.
        """
        size, count = self.sizes[axis], len(places)
        around = places == list(range(places[0], size, max(1, size // count)))
        if count == 1:
            return 1, 0
        return (size, 2) if around and self._is_ring(axis) else (places[-1] - places[0] + 1, 1)

    def _is_ring(self, axis: int) -> bool:
        return self.chip.ring > 0 and self.sizes[axis] % self.chip.ring == 0

    def _hops(self, pairs: np.ndarray) -> int:
        """Return the links of the longest path."""
        apart = np.abs(self.places[pairs[:, 0]] - self.places[pairs[:, 1]])
        for axis, size in enumerate(self.sizes):
            if self._is_ring(axis):
                apart[:, axis] = np.minimum(apart[:, axis], size - apart[:, axis])
        return int(apart.sum(1).max(initial=0))


def network(devices: Sequence[jax.Device]) -> Torus | Machines | None:
    """Return the chips of a mesh and their links, or None if the tables lack them."""
    kind, slices = devices[0].device_kind, count_slices(devices)
    if kind in GPUS:
        return Machines(GPUS[kind], np.array([device.id // HOST for device in devices]))
    if kind not in CHIPS or (slices > 1 and not CHIPS[kind].network):
        return None
    places = np.array([device.coords for device in devices])
    cores = max(Counter(map(tuple, places)).values()) // slices
    return Torus(CHIPS[kind], cores, places, tuple(int(n) for n in places.max(0) + 1), slices)
