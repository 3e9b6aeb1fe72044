"""Memory for what cannot go straight from slot to slot."""

from __future__ import annotations

import pytest

from elastic_reshard.arena import HostArena
from elastic_reshard.arena.pretend import PretendDevice
from elastic_reshard.errors import PlanError
from elastic_reshard.mover.staging import Staging


@pytest.mark.parametrize("wire", ["host", "device"])
def test_the_old_memory_goes_before_larger_one_is_taken(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(nbytes: int, label: str) -> HostArena:
        assert staging._arena is None
        return HostArena(nbytes, label)

    monkeypatch.setattr("elastic_reshard.mover.staging.HostArena", made)
    device = PretendDevice(7)
    bound: list[object] = []
    staging = Staging(growing=bound.clear)
    staging.wire = "device" if wire == "device" else "host"
    staging.device = device if wire == "device" else None
    assert staging.of(0) is None
    before = device.free()[0]
    for mib in (1, 2, 2, 4):
        held = staging.of(mib << 20)
        assert held is not None
        assert held.nbytes >= mib << 20
        bound.append(held)
        del held
        if wire == "device":
            assert before - device.free()[0] == mib << 20
    assert len(bound) == 1  # what was bound to smaller ones was let go of each time


def test_a_device_that_is_not_there_is_told() -> None:
    staging = Staging()
    staging.wire = "device"
    with pytest.raises(PlanError, match="needs one"):
        staging.of(1)
