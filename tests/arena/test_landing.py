"""Landing slots: what lies where, resetting and resuming, ledgers without torch, and tables that lie."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from elastic_reshard.arena import LandingArena, LandingReader, LandingSlot, LedgerReader, MappedArena, MappedWritable
from elastic_reshard.arena.landing import landing_nbytes
from elastic_reshard.errors import ArenaError

SPECS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w": ((3, 5), torch.bfloat16),
    "scalar": ((), torch.float64),
    "none": ((0, 4), torch.float32),
    "flat": ((1300,), torch.int32),
}
CELLS, CELL = 77, 4096


@pytest.fixture
def arena() -> Iterator[LandingArena]:
    made = LandingArena(SPECS, CELLS, CELL)
    yield made
    made.close()


def writable(arena: LandingArena, slot: int = 0, table: bytes | None = None) -> LandingSlot:
    return LandingSlot(MappedWritable(os.dup(arena.fd)), table or arena.table(), slot, arena.arena_id)


def reader(arena: LandingArena, table: bytes | None = None) -> LandingReader:
    return LandingReader(MappedArena(arena.readonly_fd()), table or arena.table(), arena.arena_id)


def ledger(arena: LandingArena, table: bytes | None = None) -> LedgerReader:
    return LedgerReader(arena.readonly_fd(), table or arena.table())


def test_parts_lie_apart_and_the_size_is_foretold(arena: LandingArena) -> None:
    assert arena.nbytes == landing_nbytes(SPECS, CELLS)
    spans = []
    for slot in json.loads(arena.table())["slots"]:
        spans += [(slot["word"], 8), (slot["publication"], 128), (slot["ledger"], CELLS)]
        for offset, shape, _, dtype in slot["tensors"].values():
            assert offset % 64 == 0
            spans.append((offset, int(np.prod(shape)) * getattr(torch, dtype).itemsize))
    spans = sorted((at, at + n) for at, n in spans if n)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= arena.nbytes


def test_what_a_mover_writes_and_marks_others_find(arena: LandingArena) -> None:
    slot, other, seen, counted = writable(arena, 1), writable(arena, 0), reader(arena), ledger(arena)
    assert (seen.publication(1), counted.publication(1), counted.count(1), seen.generation(1)) == ("", "", 0, 0)
    assert not slot.begin("p5.1")
    slot.tensor("flat")[:] = torch.arange(1300, dtype=torch.int32)
    slot.tensor("scalar").fill_(2.5)
    slot.mark(np.array([0, 8, 76]))
    assert (seen.publication(1), slot.publication, seen.generation(1)) == ("p5.1", "p5.1", 2)
    assert np.flatnonzero(seen.held(1)).tolist() == [0, 8, 76] == np.flatnonzero(slot.held).tolist()
    assert torch.equal(seen.tensor(1, "flat"), torch.arange(1300, dtype=torch.int32))
    assert float(seen.tensor(1, "scalar")) == 2.5
    assert counted.state(1) == ("p5.1", np.packbits(seen.held(1)).tobytes())
    assert counted.count(1) == 3
    assert (counted.slots, counted.cells, counted.cell) == (2, CELLS, CELL)
    assert (seen.publication(0), other.publication, counted.count(0)) == ("", "", 0)
    slot.clear(np.array([8]))
    assert np.flatnonzero(seen.held(1)).tolist() == [0, 76]


def test_a_later_mover_of_the_same_publication_goes_on_and_another_one_resets(arena: LandingArena) -> None:
    first = writable(arena)
    first.begin("p5.1")
    first.mark(np.arange(5))
    first.close()
    second = writable(arena)
    assert second.begin("p5.1")
    assert (int(second.held.sum()), second.generation) == (5, 2)
    assert not second.begin("p6.1")
    assert (int(second.held.sum()), second.generation, second.publication) == (0, 4, "p6.1")
    assert not second.begin("p5.1")  # of a name that comes again nothing is left
    assert (int(second.held.sum()), second.generation) == (0, 6)


def test_a_reset_that_broke_off_is_nobodys(arena: LandingArena) -> None:
    slot, seen, counted = writable(arena), reader(arena), ledger(arena)
    slot.begin("p5.1")
    slot.mark(np.arange(5))
    word = np.frombuffer(os.pread(arena.fd, 8, 0), dtype=np.uint64)[0]
    os.pwrite(arena.fd, int(word + 1).to_bytes(8, "little"), 0)
    assert (seen.publication(0), counted.state(0)) == ("", ("", bytes(-(-CELLS // 8))))
    assert not slot.begin("p5.1")
    assert (seen.publication(0), slot.generation, int(slot.held.sum())) == ("p5.1", 6, 0)


def test_readers_cannot_write_and_a_readonly_descriptor_makes_no_writer(arena: LandingArena) -> None:
    with pytest.raises(ValueError, match="read-only"):
        reader(arena).array(0, "flat")[0] = 1
    with pytest.raises(ArenaError, match="cannot be mapped"):
        MappedWritable(arena.readonly_fd())
    with pytest.raises(ArenaError, match="no sealed arena"):
        LedgerReader(os.memfd_create("not sealed"), arena.table())


def test_what_cannot_be_is_refused(arena: LandingArena) -> None:
    slot = writable(arena)
    for name in ("", "x" * 128, "a\0b"):
        with pytest.raises(ArenaError, match="does not fit"):
            slot.begin(name)
    with pytest.raises(ArenaError, match="slot 2"):
        writable(arena, 2)
    with pytest.raises(ArenaError, match="slot -1"):
        ledger(arena).state(-1)
    with pytest.raises(ArenaError):
        LandingArena(SPECS, -1, CELL)
    with pytest.raises(ArenaError):
        LandingArena(SPECS, 1, 0)
    counted, seen = ledger(arena), reader(arena)
    counted.close()
    seen.close()
    for call in (counted.state, seen.held, seen.publication):
        with pytest.raises(ArenaError):
            call(0)


def _slot(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda said: said["slots"][1].update({key: value})


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another version": lambda said: said.update(version=2),
    "another kind": lambda said: said.update(kind="slots"),
    "no kind": lambda said: said.pop("kind"),
    "cells below zero": lambda said: said.update(cells=-1),
    "more cells than fit": lambda said: said.update(cells=1 << 40),
    "cells that are no number": lambda said: said.update(cells="7"),
    "no cell size": lambda said: said.update(cell=0),
    "a word outside": _slot("word", 1 << 40),
    "a word before the beginning": _slot("word", -8),
    "a word off its alignment": _slot("word", 12),
    "a name outside": _slot("publication", landing_nbytes(SPECS, CELLS) - 127),
    "a ledger outside": _slot("ledger", landing_nbytes(SPECS, CELLS) - CELLS + 1),
    "a ledger that is no place": _slot("ledger", True),
    "slots that are none": lambda said: said.update(slots=[1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies_is_refused_by_all_who_read_it(arena: LandingArena, lie: str) -> None:
    said = json.loads(arena.table())
    LIES[lie](said)
    table = json.dumps(said).encode()
    for read in (reader, ledger, lambda a, t: writable(a, 0, t)):
        with pytest.raises(ArenaError):
            read(arena, table)  # type: ignore[operator]


def test_a_tensor_outside_is_refused(arena: LandingArena) -> None:
    said = json.loads(arena.table())
    said["slots"][1]["tensors"]["flat"][0] = arena.nbytes - 64
    with pytest.raises(ArenaError):
        reader(arena, json.dumps(said).encode())


def test_ledgers_are_read_without_torch(arena: LandingArena) -> None:
    slot = writable(arena)
    slot.begin("p5.1")
    slot.mark(np.arange(9))
    code = (
        "import sys; from elastic_reshard.arena.ledgers import LedgerReader; "
        f"r = LedgerReader({arena.fd}, sys.stdin.buffer.read()); print(r.publication(0), r.count(0), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=arena.table(),
        capture_output=True,
        pass_fds=[arena.fd],
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == [b"p5.1", b"9", b"False"]
