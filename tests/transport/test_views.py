"""What members declare of their memory, and what is made of a declaration that is wrong. One process plays both sides."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
import torch

from elastic_reshard.arena import HostArena, empty
from elastic_reshard.errors import ArenaError
from elastic_reshard.transport import PeerViews, Views

STAGED = (1, 0, 2, 3, 0, 4)


def declared() -> tuple[Views, dict[str, torch.Tensor], HostArena]:
    arena = HostArena(1 << 12)
    tensors = {
        "flat": arena.empty((6,), torch.bfloat16),
        "turned": arena.empty((3, 5), torch.int32).t(),
        "ordinary": torch.arange(4.0),
        "scalar": empty((), torch.int64),
        "none": torch.zeros(0, 3),
    }
    for number, t in enumerate(tensors.values()):
        t.copy_((torch.arange(t.numel()) + 10 * number).reshape(t.shape))
    views = Views({(0, "flat"): tensors["flat"], (1, "turned"): tensors["turned"], (0, "ordinary"): tensors["ordinary"]},
                  {(0, "scalar"): tensors["scalar"], (0, "none"): tensors["none"]})  # fmt: skip
    return views, tensors, HostArena(256, "staging")


def test_a_peer_sees_what_is_in_arenas_where_it_is() -> None:
    views, tensors, staging = declared()
    staging.bytes[64:80] = np.arange(16, dtype=np.uint8)
    payload, fds = views.declaration(staging, {STAGED: 64})
    assert len(fds) == 3  # the tensors' arena, the scalar's, the staging
    assert all(os.get_inheritable(fd) is False for fd in fds)
    peer = PeerViews(7, payload, fds)
    assert torch.equal(peer.tensor(("s", 0, "flat")), tensors["flat"])
    assert torch.equal(peer.tensor(("s", 1, "turned")), tensors["turned"])
    assert peer.tensor(("d", 0, "scalar")).item() == 30
    assert peer.array(("s", 0, "ordinary")) is None
    assert peer.array(("d", 0, "none")) is None
    assert peer.dtype(("s", 0, "ordinary")) == torch.float32
    assert peer.staged(STAGED, 4, 4).tobytes() == bytes(range(16))
    # It is the same memory, and it is read-only.
    tensors["flat"].fill_(3)
    assert peer.tensor(("s", 0, "flat")).tolist() == [3.0] * 6
    array = peer.array(("s", 0, "flat"))
    assert array is not None
    assert not array.flags.writeable
    peer.close()


def test_what_was_not_declared_is_refused_by_name() -> None:
    views, _, staging = declared()
    peer = PeerViews(7, *views.declaration(staging, {STAGED: 64}))
    with pytest.raises(ArenaError, match="member 7 declared no other"):
        peer.array(("s", 0, "other"))
    with pytest.raises(ArenaError, match="ordinary of member 7 is not in an arena"):
        peer.tensor(("s", 0, "ordinary"))
    with pytest.raises(ArenaError, match="member 7 stages no leg"):
        peer.staged((1, 0, 2, 3, 0, 5), 4, 4)
    with pytest.raises(ArenaError, match=r"moves missing \(source\)"):
        views.tensor(("s", 0, "missing"))
    with pytest.raises(ArenaError, match=r"moves flat \(destination\)"):
        views.tensor(("d", 0, "flat"))
    peer.close()


WRONG: dict[str, Any] = {
    "an offset past the end": lambda said: said["buffers"][0].__setitem__(4, 1 << 12),
    "a negative offset": lambda said: said["buffers"][0].__setitem__(4, -2),
    "a shape too large": lambda said: said["buffers"][0].__setitem__(5, [1 << 40]),
    "strides too large": lambda said: said["buffers"][0].__setitem__(6, [1 << 20]),
    "strides that go back": lambda said: said["buffers"][0].__setitem__(6, [-64]),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_declaration_that_reaches_outside_its_arena_is_refused(how: str) -> None:
    views, _, staging = declared()
    payload, fds = views.declaration(staging, {})
    said = json.loads(payload)
    WRONG[how](said)
    peer = PeerViews(7, json.dumps(said).encode(), fds)
    with pytest.raises(ArenaError, match="what the arena's owner declared is wrong"):
        peer.array(("s", 0, "flat"))
    peer.close()


def test_staging_outside_its_arena_is_refused() -> None:
    views, _, staging = declared()
    peer = PeerViews(7, *views.declaration(staging, {STAGED: 250}))
    with pytest.raises(ArenaError, match="declared is wrong"):
        peer.staged(STAGED, 4, 4)
    peer.close()


def test_a_descriptor_that_is_no_arena_is_refused_and_closed() -> None:
    views, _, staging = declared()
    payload, fds = views.declaration(staging, {})
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4096)
    given = [fds[0], loose, *fds[1:]]
    with pytest.raises(ArenaError, match="no arena"):
        PeerViews(7, payload, given)
    for fd in given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_more_arenas_than_descriptors_can_be_passed_are_staged() -> None:
    arenas = [HostArena(64) for _ in range(230)]
    tensors = {(0, f"w{i}"): a.empty((4,), torch.uint8) for i, a in enumerate(arenas)}
    views = Views(tensors, {})
    assert all(views.in_arena(("s", *key)) for key in tensors)
    payload, fds = views.declaration(None, {})
    peer = PeerViews(0, payload, fds)
    mapped = [peer.array(("s", *key)) is not None for key in tensors]
    assert len(fds) == sum(mapped) == 200
    assert [views.in_arena(("s", *key)) for key in tensors] == mapped
    peer.close()
