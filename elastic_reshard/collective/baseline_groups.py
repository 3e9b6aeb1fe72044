"""The gloo process groups of the gather-and-broadcast baseline, and the few operations it uses of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from elastic_reshard.errors import LayoutError, TransferTimeout
from elastic_reshard.transport.polling import whole_ms

__all__ = ["BaselineGroups", "alltoallv", "broadcast", "receive", "send"]

# torch's stubs of ProcessGroupGloo lack its methods.
Group = Any


@dataclass
class BaselineGroups:
    """The gloo process groups of a baseline; smaller ones are formed when a layout first needs them.

    Everything here is named by world ranks. Form with `BaselineGroups.form`.
    """

    rank: int
    size: int
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    timeout: float
    store: Store
    interface: str | None
    _formed: dict[tuple[int, ...], Group] = field(default_factory=dict)

    @classmethod
    def form(
        cls,
        store: Store,
        rank: int,
        size: int,
        sources: Sequence[int],
        destinations: Sequence[int],
        timeout: float,
        interface: str | None = None,
    ) -> BaselineGroups:
        """Form the group of all `size` ranks. Every rank must call it, with a store in which nobody did before.

        No default group is needed. `timeout` (seconds) bounds this call and each later `run`. `interface`: the
        network interface to bind ("lo" for the loopback); None leaves the choice to gloo. Raises LayoutError
        for ranks that do not exist, TransferTimeout when not everyone came; gloo does not tell who.
        """
        named = {*sources, *destinations, rank}
        if not sources or not destinations or not named <= set(range(size)):
            raise LayoutError(
                f"baseline: rank {rank}, sources {list(sources)} and destinations {list(destinations)} must "
                f"be ranks of the {size} in the store, and neither side may be empty"
            )
        sides = (tuple(sorted(sources)), tuple(sorted(destinations)))
        groups = cls(rank, size, *sides, timeout, store, interface)
        groups.over(tuple(range(size)))
        return groups

    @property
    def world(self) -> Group:
        """The group of all ranks."""
        return self._formed[tuple(range(self.size))]

    def over(self, ranks: tuple[int, ...]) -> Group:
        """The group of these ranks, in this order. The first call forms it: all of them make it, in one sequence."""
        if ranks not in self._formed:
            # Named by its ranks; a common prefix keeps it apart from what else is in the store.
            where = PrefixStore("elastic_reshard/baseline/" + ".".join(map(str, ranks)), self.store)
            make: Any = ProcessGroupGloo
            options = make._Options()
            options._timeout = whole_ms(self.timeout)
            options._devices = [
                make.create_default_device() if self.interface is None else make.create_device(interface=self.interface)
            ]
            try:
                self._formed[ranks] = make(where, ranks.index(self.rank), len(ranks), options)
            except RuntimeError as error:
                raise TransferTimeout(
                    f"rank {self.rank}: no gloo group over ranks {ranks} within {self.timeout:g} s ({error}). "
                    "Check that all of them run and reach each other, then form the groups in a fresh store."
                ) from error
        return self._formed[ranks]


def broadcast(group: Group, tensor: Tensor, root: int) -> dist.Work:
    """From group rank `root` to all, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    work: dist.Work = group.broadcast([tensor], options)
    return work


def alltoallv(group: Group, into: Tensor, given: Tensor, receives: Sequence[int], sends: Sequence[int]) -> dist.Work:
    """Elements `sends[r]` of `given` to each group rank r, `receives[r]` from it into `into`, in rank order."""
    work: dist.Work = group.alltoall_base(into, given, list(receives), list(sends), dist.AllToAllOptions())
    return work


def send(group: Group, tensor: Tensor, to: int, tag: int) -> dist.Work:
    """To one group rank. The work must be held until it is done."""
    work: dist.Work = group.send([tensor], to, tag)
    return work


def receive(group: Group, tensor: Tensor, source: int, tag: int) -> dist.Work:
    """From one group rank, exactly as many bytes as it sends. The work must be held until it is done."""
    work: dist.Work = group.recv([tensor], source, tag)
    return work
