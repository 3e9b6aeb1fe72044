"""A `Stage` whose members' tensors lie on devices: GPUs, or pretended ones where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elastic_reshard.bench import gpu_rank as on
from elastic_reshard.bench import rank
from elastic_reshard.bench.stage import PRELOAD, Gang, Stage
from elastic_reshard.protocol.deadlines import Policies

__all__ = ["DeviceStage", "Kit", "devices_here"]

_LIBRARIES: Final = ("cuda.bindings.driver", "cuda.bindings.nvrtc", "nccl.core", "elastic_reshard.bench.gpu_rank")


@dataclass(frozen=True)
class Kit:
    """What members of a stage are made of. device: "cuda", "pretend" or "cpu"; count: of devices, over which members are spread
    in the order in which they are made. stage, window: of `er.join`; None: what it does by itself. network: of the job."""

    device: str = "cuda"
    count: int = 1
    stage: str | None = None
    window: str | None = None
    network: str = "auto"

    def index(self, number: int) -> int:
        """The device of the member with that number."""
        return number % max(1, self.count)


def devices_here() -> int:
    """GPUs that a fresh process could use; 0 without CUDA. Touches no context of this process."""
    import torch

    with contextlib.suppress(RuntimeError):
        return torch.cuda.device_count()
    return 0


class DeviceStage(Stage):
    """Members in the order in which their gangs are made take devices in turn; `kits` has others for some gangs."""

    def __init__(
        self, kit: Kit, cell: int = 1 << 20, kits: Mapping[str, Kit] | None = None, late_after: float = 10.0
    ) -> None:
        super().__init__(cell, Policies(network=kit.network, late_after=late_after))
        if kit.device == "cuda":  # seconds in each member otherwise; none of them touches a GPU when it is imported
            self._context.set_forkserver_preload([*PRELOAD, *_LIBRARIES])
        self.kit, self._kits = kit, dict(kits or {})
        self._number: dict[str, int] = {}

    def gang(self, name: str, role: Any, layout: Any, hosts: Sequence[str]) -> Gang:
        for number in range(len(hosts)):
            self._number[f"{name}-{number}"] = len(self._number)
        return super().gang(name, role, layout, hosts)

    def place(self, gang: Gang, number: int) -> on.Place:
        """Where a member of a gang has its tensors."""
        kit = self._kits.get(gang.name, self.kit)
        return on.Place(kit.device, kit.index(self._number[f"{gang.name}-{number}"]), kit.stage, kit.window)

    def join(self, *gangs: Gang) -> None:
        calls = []
        for gang in gangs:
            for number, actor in enumerate(gang.actors):
                seat = rank.Seat(self.url, str(self.folder), self.token, gang.name, len(gang), number, gang.role,
                                 gang.hosts[number], gang.layout)  # fmt: skip
                calls.append((actor, actor.begin(on.join, seat, self.place(gang, number))))
        for actor, call in calls:
            actor.id = call.result()
