"""Arenas on a device: words, names and ledgers on the host, tensors on the device, and tables that lie about either."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic_reshard.arena import LandingArena, LandingReader, LandingSlot, LedgerReader, MappedArena, MappedWritable
from elastic_reshard.arena.boxes import CopyTable
from elastic_reshard.arena.copies import Copies, raw
from elastic_reshard.arena.device import Device
from elastic_reshard.arena.landing import landing_device_nbytes, landing_nbytes
from elastic_reshard.arena.slots import SlotArena, SlotReader, device_nbytes_for, nbytes_for
from elastic_reshard.arena.strided import Strided
from elastic_reshard.arena.tables import memory_of
from elastic_reshard.errors import ArenaError
from tests.processes import Rank, run_ranks

SPECS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w": ((3, 5), torch.bfloat16),
    "scalar": ((), torch.float64),
    "none": ((0, 4), torch.float32),
    "flat": ((1300,), torch.int32),
}
CELLS, CELL = 77, 4096


def slots_of(arena: SlotArena, table: bytes | None = None) -> SlotReader:
    assert arena.device is not None
    memory = arena.device.map(os.dup(arena.fds[1]), arena.device_nbytes, writable=False)
    return SlotReader(MappedArena(arena.readonly_fd()), table or arena.table(), arena.arena_id, memory)


def landed_of(arena: LandingArena, table: bytes | None = None) -> LandingReader:
    assert arena.device is not None
    memory = arena.device.map(os.dup(arena.fds[1]), arena.device_nbytes, writable=False)
    return LandingReader(MappedArena(arena.readonly_fd()), table or arena.table(), arena.arena_id, memory)


def writable(arena: LandingArena, slot: int = 0) -> LandingSlot:
    assert arena.device is not None
    memory = arena.device.map(os.dup(arena.fds[1]), arena.device_nbytes, writable=True)
    return LandingSlot(MappedWritable(os.dup(arena.fd)), arena.table(), slot, arena.arena_id, memory)


def test_a_slot_on_a_device_is_written_and_read(device: Device) -> None:
    arena = SlotArena(SPECS, device=device)
    assert (arena.nbytes, len(arena.fds), arena.fds[0]) == (nbytes_for(SPECS, device=True), 2, arena.fd)
    assert arena.device_nbytes >= device_nbytes_for(SPECS)
    assert memory_of(arena.table()) == (device.kind, device.id, arena.device_nbytes)
    reader = slots_of(arena)
    assert (reader.device, reader.slots, reader.generation(1)) == (device, 2, 0)
    for turn in (1, 2):
        arena.begin_write(1)
        assert reader.generation(1) % 2 == 1
        arena.tensor(1, "flat").copy_(torch.arange(1300, dtype=torch.int32) * turn)
        arena.tensor(1, "w").fill_(turn)
        device.current().synchronize()
        assert arena.end_write(1) == reader.generation(1) == 2 * turn
        assert torch.equal(reader.tensor(1, "flat").cpu(), torch.arange(1300, dtype=torch.int32) * turn)
        assert float(reader.tensor(1, "w").sum()) == 15 * turn
    assert (reader.tensor(1, "none").shape, reader.dtype(1, "w")) == ((0, 4), "bfloat16")
    assert not reader.tensor(0, "flat").any()
    array = reader.array(1, "flat")
    assert isinstance(array, Strided)
    assert np.array_equal(device.read(array, device.current()), np.arange(1300) * 2)
    arena.close()
    arena.close()
    assert int(reader.tensor(1, "flat")[-1]) == 2598  # its owner's end changes nothing
    reader.close()
    with pytest.raises(ArenaError):
        reader.array(1, "flat")


def test_cells_land_in_a_slot_on_a_device(device: Device) -> None:
    arena = LandingArena(SPECS, CELLS, CELL, device=device)
    assert (arena.nbytes, len(arena.fds)) == (landing_nbytes(SPECS, CELLS, device=True), 2)
    assert arena.device_nbytes >= landing_device_nbytes(SPECS)
    slot, seen = writable(arena, 1), landed_of(arena)
    counted = LedgerReader(arena.readonly_fd(), arena.table())
    assert not slot.begin("p5.1")
    target = slot.array("flat")
    assert isinstance(target, Strided)
    assert slot.device is device
    source = device.scratch(1300 * 4).strided(0, (1300,), (4,), 4)
    device.tensor(source, torch.int32).copy_(torch.arange(1300, dtype=torch.int32))
    device.copy(CopyTable.of([(target, source)]), device.current())
    device.current().synchronize()
    slot.mark(np.array([0, 8, 76]))
    assert (seen.publication(1), seen.generation(1), counted.count(1)) == ("p5.1", 2, 3)
    assert np.flatnonzero(seen.held(1)).tolist() == [0, 8, 76]
    assert torch.equal(seen.tensor(1, "flat").cpu(), torch.arange(1300, dtype=torch.int32))
    assert torch.equal(slot.tensor("flat").cpu(), torch.arange(1300, dtype=torch.int32))
    assert not slot.begin("p6.1")
    assert (seen.publication(1), seen.generation(1), counted.count(1)) == ("p6.1", 4, 0)
    assert (counted.publication(0), seen.publication(0)) == ("", "")
    other = writable(arena, 0)
    other.begin("p7.1")
    other.tensor("flat").fill_(7)  # the other slot's bytes are none of this one's
    assert torch.equal(seen.tensor(1, "flat").cpu(), torch.arange(1300, dtype=torch.int32))
    assert torch.equal(seen.tensor(0, "flat").cpu(), torch.full((1300,), 7, dtype=torch.int32))


def test_an_install_out_of_a_slot_is_one_set_of_copies(device: Device) -> None:
    arena = SlotArena({"a": ((64, 96), torch.bfloat16), "b": ((96, 64), torch.float32)}, device=device)
    arena.begin_write(0)
    for name, tensor in arena.tensors(0).items():
        tensor.copy_(torch.arange(64 * 96).view(tensor.shape) % 251 + (name == "b"))
    device.current().synchronize()
    generation = arena.end_write(0)
    reader = slots_of(arena)
    live = device.tensor(device.scratch(64 * 48 * 2).strided(0, (64, 48), (96, 2), 2), torch.bfloat16)
    copies = Copies()
    source = reader.array(0, "a")
    copies.add(raw(live), source[..., 48:96])
    copies.run()
    device.current().synchronize()
    assert reader.generation(0) == generation
    assert torch.equal(live.cpu(), (torch.arange(64 * 96).view(64, 96) % 251).to(torch.bfloat16)[:, 48:])


def _tensor(key: int, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda said: said["slots"][1]["tensors"]["flat"].__setitem__(key, value)


def test_tensors_of_both_slots_lie_apart(device: Device) -> None:
    for arena in (SlotArena(SPECS, device=device), LandingArena(SPECS, CELLS, CELL, device=device)):
        spans = []
        for slot in json.loads(arena.table())["slots"]:
            for offset, shape, _, dtype in slot["tensors"].values():
                assert offset % 64 == 0
                spans.append((offset, offset + int(np.prod(shape)) * getattr(torch, dtype).itemsize))
        spans = sorted(span for span in spans if span[0] < span[1])
        assert len(spans) == 6
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert spans[-1][1] <= arena.device_nbytes


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no memory": lambda said: said.pop("memory"),
    "memory of another kind": lambda said: said["memory"].update(kind="tpu"),
    "memory of no kind": lambda said: said["memory"].pop("kind"),
    "more memory than there is": lambda said: said["memory"].update(nbytes=said["memory"]["nbytes"] + 1),
    "memory below zero": lambda said: said["memory"].update(nbytes=-1),
    "memory that is no number": lambda said: said["memory"].update(nbytes="7"),
    "memory that is nothing": lambda said: said.update(memory=None),
    "memory that is a list": lambda said: said.update(memory=[1]),
    "a device that is none": lambda said: said["memory"].update(device=7),
    "a tensor outside": lambda said: _tensor(0, said["memory"]["nbytes"] - 64)(said),
    "a tensor far outside": _tensor(0, 1 << 60),
    "a tensor before": _tensor(0, -64),
    "a tensor off its alignment": _tensor(0, 130),
    "a shape below zero": _tensor(1, [-1]),
    "a shape too large": _tensor(1, [1 << 40]),
    "a step below zero": _tensor(2, [-4]),
    "a step too large": _tensor(2, [1 << 40]),
    "a dtype that is none": _tensor(3, "float3"),
    "a word in the device's memory": lambda said: said["slots"][1].update(word=1 << 20),
    "a word off its alignment": lambda said: said["slots"][1].update(word=12),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies_is_refused(device: Device, lie: str) -> None:
    slots, landing = SlotArena(SPECS, device=device), LandingArena(SPECS, CELLS, CELL, device=device)
    tables = []
    for arena in (slots, landing):
        said = json.loads(arena.table())
        LIES[lie](said)
        tables.append(json.dumps(said).encode())
    with pytest.raises(ArenaError):
        slots_of(slots, tables[0])
    with pytest.raises(ArenaError):
        landed_of(landing, tables[1])


def test_memory_must_come_with_a_table_that_tells_of_it(device: Device) -> None:
    on, off = SlotArena(SPECS, device=device), SlotArena(SPECS)
    with pytest.raises(ArenaError, match="mapped was none"):
        SlotReader(MappedArena(on.readonly_fd()), on.table())
    memory = device.map(os.dup(on.fds[1]), on.device_nbytes, writable=False)
    with pytest.raises(ArenaError, match="mapped was"):
        SlotReader(MappedArena(off.readonly_fd()), off.table(), "x", memory)
    assert (off.fds, off.device_nbytes, memory_of(off.table())) == ((off.fd,), 0, None)
    assert off.nbytes == nbytes_for(SPECS)
    for table in (b"", b"[]", b"7", b'{"memory": 7}', b"{" * 100_000):
        with pytest.raises(ArenaError):
            memory_of(table)


def test_what_is_mapped_to_be_read_is_not_written(device: Device) -> None:
    arena = SlotArena(SPECS, device=device)
    reader = slots_of(arena)
    source = device.scratch(1300 * 4).strided(0, (1300,), (4,), 4)
    copies = Copies()
    copies.add(reader.array(0, "flat"), source)
    with pytest.raises(ArenaError, match="read-only"):
        copies.run()


@pytest.mark.parametrize("kind", ["slots", "landing"])
def test_more_than_the_device_has_is_refused(device: Device, kind: str) -> None:
    huge: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"w": ((1 << 40,), torch.bfloat16)}
    with pytest.raises(ArenaError, match="bytes are free"):
        _ = SlotArena(huge, device=device) if kind == "slots" else LandingArena(huge, 1, CELL, device=device)


def _in_a_process_with_little(me: Rank) -> str:
    os.environ["ELASTIC_RESHARD_PRETEND_BYTES"] = str(1 << 20)
    from elastic_reshard.arena.devices import open_device

    device = open_device("pretend", "pretend:0")
    first = SlotArena({"w": ((100_000,), torch.bfloat16)}, device=device)
    try:
        SlotArena({"w": ((200_000,), torch.bfloat16)}, device=device)
    except ArenaError as error:
        del first
        return str(error)
    return "not refused"


def test_a_pretend_device_may_be_small() -> None:
    (said,) = run_ranks(_in_a_process_with_little, 1, group=False, timeout=30)
    assert f"of {1 << 20} bytes are free" in said
