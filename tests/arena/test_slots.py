"""Slots: what lies where, the generation word, tables that lie, and the same through a read-only map in another process."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.slots import SlotArena, SlotReader, nbytes_for
from elastic_reshard.errors import ArenaError, LayoutError
from tests.processes import Rank, run_ranks

SPECS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w": ((3, 5), torch.bfloat16),
    "scalar": ((), torch.float64),
    "none": ((0, 4), torch.float32),
    "flags": ((7,), torch.bool),
    "wide": ((2, 2, 2), torch.complex128),
    "fp8": ((130,), torch.float8_e4m3fn),
}


def reader_of(arena: SlotArena, table: bytes | None = None) -> SlotReader:
    return SlotReader(MappedArena(arena.readonly_fd()), table or arena.table(), arena.arena_id)


def set_bits(arena: SlotArena, slot: int, seed: int) -> dict[str, bytes]:
    """Every tensor's bytes, unlike in each slot and tensor."""
    found = {}
    for number, (name, tensor) in enumerate(arena.tensors(slot).items()):
        flat = tensor.reshape(-1).view(torch.uint8)
        flat[:] = ((torch.arange(flat.numel()) + 31 * number + seed) % 251).to(torch.uint8)
        found[name] = flat.numpy().tobytes()
    return found


def test_a_reader_finds_every_tensor_of_every_slot_bit_for_bit() -> None:
    arena = SlotArena(SPECS, slots=3)
    written = [set_bits(arena, slot, 77 * slot) for slot in range(3)]
    reader = reader_of(arena)
    assert reader.slots == 3
    for slot in range(3):
        assert tuple(reader.names(slot)) == tuple(SPECS)
        for name, (shape, dtype) in SPECS.items():
            array, tensor = reader.array(slot, name), reader.tensor(slot, name)
            assert array.shape == shape == tuple(tensor.shape)
            assert tensor.dtype == dtype
            assert not array.flags.writeable
            assert array.tobytes() == written[slot][name]
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == written[slot][name]


def test_slots_are_equal_page_aligned_and_of_the_size_that_was_foretold() -> None:
    arena = SlotArena(SPECS)
    said = json.loads(arena.table())
    words = [slot["word"] for slot in said["slots"]]
    assert all(at % 4096 == 0 for at in words)
    assert arena.nbytes == nbytes_for(SPECS) == 2 * (words[1] - words[0])
    spans = []
    for slot in said["slots"]:
        spans.append((slot["word"], slot["word"] + 8))
        for offset, shape, _, dtype in slot["tensors"].values():
            assert offset % 64 == 0
            spans.append((offset, offset + int(np.prod(shape)) * getattr(torch, dtype).itemsize))
    spans = sorted(s for s in spans if s[1] > s[0])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= arena.nbytes
    assert nbytes_for({}, 2) == SlotArena({}).nbytes == 2 * 4096


def resident(arena: SlotArena) -> int:
    return os.stat(f"/proc/self/fd/{arena.fd}").st_blocks * 512


def test_pages_are_there_from_the_start_when_touched() -> None:
    specs = {"w": ((1 << 20,), torch.float32)}
    assert resident(SlotArena(specs, touch=False)) < nbytes_for(specs) // 8
    assert resident(SlotArena(specs)) == nbytes_for(specs)


def test_the_generation_is_odd_while_writing_and_rises() -> None:
    arena = SlotArena(SPECS)
    reader = reader_of(arena)
    assert [reader.generation(s) for s in (0, 1)] == [0, 0]
    arena.begin_write(1)
    assert [reader.generation(s) for s in (0, 1)] == [0, 1]
    assert arena.end_write(1) == 2
    assert [reader.generation(s) for s in (0, 1)] == [0, 2]
    with pytest.raises(ArenaError, match="begin_write"):
        arena.end_write(1)
    arena.begin_write(1)
    broken = reader.generation(1)
    arena.begin_write(1)  # the first write broke off
    assert reader.generation(1) % 2 == 1
    assert reader.generation(1) > broken
    assert arena.end_write(1) == reader.generation(1) == 6
    assert reader.generation(0) == 0


def test_what_cannot_be_is_refused() -> None:
    arena = SlotArena(SPECS)
    reader = reader_of(arena)
    for call in (arena.begin_write, arena.end_write, arena.generation, arena.tensors, reader.generation, reader.names):
        for slot in (-1, 2):
            with pytest.raises(ArenaError, match="slot"):
                call(slot)
    with pytest.raises(ArenaError, match="declares no nowhere in slot 0"):
        reader.array(0, "nowhere")
    with pytest.raises(ArenaError):
        SlotArena(SPECS, slots=0)
    with pytest.raises(ArenaError, match="no shape"):
        nbytes_for({"w": ((-1,), torch.float32)})
    with pytest.raises(LayoutError):
        nbytes_for({"w": ((1,), torch.quint4x2)})
    arena.close()
    reader.close()
    with pytest.raises(ArenaError):
        arena.begin_write(0)
    with pytest.raises(ArenaError):
        reader.generation(0)


def lie(change: Callable[[dict[str, Any]], object]) -> bytes:
    arena = SlotArena(SPECS, touch=False)
    said = json.loads(arena.table())
    change(said)
    return json.dumps(said).encode()


def entry(said: dict[str, Any]) -> list[Any]:
    found: list[Any] = said["slots"][1]["tensors"]["w"]
    return found


SIZE = nbytes_for(SPECS)
LIES: dict[str, bytes] = {
    "no JSON": b"{",
    "no table": b"[]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "another version": lie(lambda t: t.update(version=2)),
    "no slots": lie(lambda t: t.pop("slots")),
    "word outside": lie(lambda t: t["slots"][0].update(word=SIZE)),
    "word reaches outside": lie(lambda t: t["slots"][0].update(word=SIZE - 4)),
    "word off its alignment": lie(lambda t: t["slots"][0].update(word=4)),
    "word negative": lie(lambda t: t["slots"][0].update(word=-8)),
    "word huge": lie(lambda t: t["slots"][0].update(word=1 << 80)),
    "word a float": lie(lambda t: t["slots"][0].update(word=0.0)),
    "offset outside": lie(lambda t: entry(t).__setitem__(0, SIZE)),
    "offset negative": lie(lambda t: entry(t).__setitem__(0, -64)),
    "offset unaligned": lie(lambda t: entry(t).__setitem__(0, 4097)),
    "shape too large": lie(lambda t: entry(t).__setitem__(1, [3, 1 << 40])),
    "shape overflows": lie(lambda t: entry(t).__setitem__(1, [1 << 62, 1 << 62])),
    "shape a float": lie(lambda t: entry(t).__setitem__(1, [3, 5.0])),
    "shape true": lie(lambda t: entry(t).__setitem__(1, [True, 5])),
    "shape negative": lie(lambda t: entry(t).__setitem__(1, [-3, 5])),
    "shape of another length": lie(lambda t: entry(t).__setitem__(1, [3])),
    "shape of too many dims": lie(lambda t: (entry(t).__setitem__(1, [1] * 65), entry(t).__setitem__(2, [2] * 65))),
    "strides too large": lie(lambda t: entry(t).__setitem__(2, [1 << 20, 2])),
    "strides negative": lie(lambda t: entry(t).__setitem__(2, [-10, 2])),
    "stride of one row huge": lie(lambda t: entry(t).__setitem__(1, [1 << 70, 5]) or entry(t).__setitem__(2, [0, 2])),
    "strides unaligned": lie(lambda t: entry(t).__setitem__(2, [11, 2])),
    "unknown dtype": lie(lambda t: entry(t).__setitem__(3, "float31")),
    "larger dtype": lie(lambda t: (entry(t).__setitem__(0, SIZE - 32), entry(t).__setitem__(3, "float64"))),
    "no row": lie(lambda t: t["slots"][1]["tensors"].update(w=None)),
    "short row": lie(lambda t: entry(t).pop()),
}


@pytest.mark.parametrize("how", LIES)
def test_a_lying_table_is_refused(how: str) -> None:
    arena = SlotArena(SPECS, touch=False)
    with pytest.raises(ArenaError):
        reader_of(arena, LIES[how])


def test_a_table_with_any_numbers_is_refused_or_readable() -> None:
    """A read outside of the arena would end this process."""
    arena = SlotArena(SPECS)
    chance = random.Random(3)
    numbers = [-1, 0, 1, 2, 63, 64, 4096, SIZE - 8, SIZE - 1, SIZE, SIZE + 1, 1 << 31, 1 << 63, 1 << 64]
    refused = read = 0
    for _ in range(600):
        said = json.loads(arena.table())
        row = said["slots"][chance.randrange(2)]["tensors"][chance.choice(list(SPECS))]
        places: list[tuple[Any, int]] = [(row, 0), *((part, i) for part in row[1:3] for i in range(len(part)))]
        for part, i in chance.sample(places, min(len(places), chance.randint(1, 3))):
            part[i] = chance.choice(numbers)
        try:
            reader = reader_of(arena, json.dumps(said).encode())
        except ArenaError:
            refused += 1
            continue
        for slot in range(2):
            for name in SPECS:
                array = reader.array(slot, name)
                if array.size:
                    array[(0,) * array.ndim].tobytes()
                    array[(-1,) * array.ndim].tobytes()
                    read += 1
    assert refused > 100
    assert read > 100


def _writer(me: Rank, folder: str, die: bool) -> int:
    """Rewrites slot 0 with its version in every element, again and again, until it is told to stop."""
    arena = SlotArena({"w": ((1 << 20,), torch.int64)})
    writes = 0

    def write() -> None:
        nonlocal writes
        arena.begin_write(0)
        arena.tensor(0, "w").fill_(writes)
        arena.end_write(0)
        writes += 1

    write()
    said = {"pid": os.getpid(), "fd": arena.fd, "table": arena.table().decode()}
    Path(folder, "draft").write_text(json.dumps(said))
    Path(folder, "draft").rename(Path(folder, "arena"))
    end = time.monotonic() + me.timeout
    while not Path(folder, "stop").exists():
        if time.monotonic() > end:
            raise TimeoutError("nobody told the writer to stop")
        write()
        time.sleep(0.002 * (writes % 3))  # the load: sometimes a reader gets through
    if die:
        arena.begin_write(0)
        arena.tensor(0, "w")[: 1 << 19] = -1
        os.kill(os.getpid(), signal.SIGKILL)
    return writes


def _opened(folder: str, timeout: float) -> SlotReader:
    end = time.monotonic() + timeout
    while not Path(folder, "arena").exists():
        if time.monotonic() > end:
            raise TimeoutError("no arena was offered")
        time.sleep(0.005)
    said = json.loads(Path(folder, "arena").read_text())
    fd = os.open(f"/proc/{said['pid']}/fd/{said['fd']}", os.O_RDONLY | os.O_CLOEXEC)
    return SlotReader(MappedArena(fd), said["table"].encode(), "writer")


def _reader(me: Rank, folder: str, die: bool) -> dict[str, int]:
    """Copies the slot until it has seen what it came for, and counts what the generation said of each copy."""
    reader, copy = _opened(folder, me.timeout), np.zeros(1 << 20, dtype=np.uint64)
    seen = {"clean": 0, "changed": 0, "torn": 0, "unseen": 0}
    writer = os.pidfd_open(json.loads(Path(folder, "arena").read_text())["pid"])
    end = time.monotonic() + me.timeout / 2
    while (seen["clean"] < 5 or seen["torn"] < 5) and time.monotonic() < end:
        before = reader.generation(0)
        np.copyto(copy, reader.array(0, "w"))
        same = before % 2 == 0 and reader.generation(0) == before
        torn = bool((copy != copy[0]).any())
        seen["clean" if same else "changed"] += 1
        seen["torn"] += torn
        seen["unseen"] += torn and same
        if same and not torn:
            assert copy[0] == before // 2 - 1
    Path(folder, "stop").touch()
    if die:
        assert select.select([writer], [], [], me.timeout / 3)[0], "the writer has not ended"
        seen["last"] = reader.generation(0) % 2
        seen["half"] = int((reader.array(0, "w") == np.uint64(2**64 - 1)).sum())
    os.close(writer)
    return seen


def _either(me: Rank, folder: str, die: bool) -> Any:
    return (_writer if me.rank == 0 else _reader)(me, folder, die)


@pytest.mark.parametrize("die", [False, True])
def test_a_reader_in_another_process_knows_every_torn_copy(tmp_path: Path, die: bool) -> None:
    _, seen = run_ranks(_either, 2, str(tmp_path), die, timeout=30, group=False, lost=(0,) if die else ())
    assert seen["clean"] >= 5
    assert seen["torn"] >= 5
    assert seen["unseen"] == 0
    if die:  # the writer was killed in the middle of a write: its memory is there, and says so
        assert seen["last"] == 1
        assert seen["half"] == 1 << 19
