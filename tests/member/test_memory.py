"""What is said of memory before it is taken: real limits of a real process, and cgroup trees as the kernel lays them out."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from elastic_reshard.arena.slots import SlotArena, nbytes_for
from elastic_reshard.errors import ArenaError
from elastic_reshard.member.memory import check_fits, free_memory
from tests.processes import Rank, run_ranks

GIB = 1 << 30


def test_what_fits_is_reported_and_what_does_not_is_refused_with_figures() -> None:
    report = check_fits(4096, "the arena of trainer-0")
    assert report["what"] == "the arena of trainer-0"
    assert report["needed"] == 4096
    assert report["free"][report["limit"]] == min(report["free"].values())
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < report["free"]["MemAvailable"] <= total
    with pytest.raises(ArenaError, match=rf"the arena of trainer-0 needs {total + 1} bytes .*MemAvailable leaves \d+"):
        check_fits(total + 1, "the arena of trainer-0")


def _limited(me: Rank) -> list[str]:
    """Under RLIMIT_AS: what the report says, and what the system does."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + GIB, size + GIB))
    small, large = {"w": ((128 << 20,), torch.uint8)}, {"w": ((GIB // 2 + (16 << 20),), torch.uint8)}
    assert check_fits(nbytes_for(small), "small")["limit"] == "RLIMIT_AS"
    SlotArena(small, touch=False).close()
    said = []
    for call in (lambda: check_fits(nbytes_for(large), "large"), lambda: SlotArena(large, touch=False)):
        try:
            call()
        except ArenaError as error:
            said.append(str(error))
    return said


def test_an_address_space_limit_is_seen_before_the_system_refuses() -> None:
    ((foretold, refused),) = run_ranks(_limited, 1, group=False)
    assert "RLIMIT_AS leaves" in foretold
    assert "cannot make an arena" in refused


def tree(root: Path, groups: dict[str, tuple[str, int, int]], own: str = "0::/job/worker\n") -> Path:
    """A /proc and /sys of cgroup v2: folder -> (memory.max, memory.current, inactive_file)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 99999 kB\nMemAvailable:   65536 kB\n")
    (root / "proc/self/cgroup").write_text(f"4:memory:/elsewhere\n{own}")
    (root / "proc/self/statm").write_text("1 1 1\n")
    for folder, (most, current, cache) in groups.items():
        at = root / "sys/fs/cgroup" / folder
        at.mkdir(parents=True, exist_ok=True)
        (at / "memory.max").write_text(f"{most}\n")
        (at / "memory.current").write_text(f"{current}\n")
        (at / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return root


MIB = 1 << 20
TREES: dict[str, tuple[dict[str, tuple[str, int, int]], str, int | None]] = {
    "own limit": ({"job/worker": (f"{10 * MIB}", 4 * MIB, 0)}, "0::/job/worker\n", 6 * MIB),
    "page cache can be given back": ({"job/worker": (f"{10 * MIB}", 4 * MIB, MIB)}, "0::/job/worker\n", 7 * MIB),
    "the parent's limit is tighter": (
        {"job/worker": (f"{10 * MIB}", 4 * MIB, 0), "job": (f"{9 * MIB}", 8 * MIB, 0)},
        "0::/job/worker\n",
        MIB,
    ),
    "only the parent has one": (
        {"job/worker": ("max", 4 * MIB, 0), "job": (f"{9 * MIB}", 8 * MIB, 0)},
        "0::/job/worker\n",
        MIB,
    ),
    "a container's own at the root": ({"": (f"{8 * MIB}", 3 * MIB, 0)}, "0::/\n", 5 * MIB),
    "over its limit": ({"job/worker": (f"{2 * MIB}", 3 * MIB, 0)}, "0::/job/worker\n", 0),
    "no limit": ({"job/worker": ("max", 4 * MIB, 0)}, "0::/job/worker\n", None),
    "cgroup v1 only": ({}, "", None),
}


@pytest.mark.parametrize("how", TREES)
def test_the_tightest_cgroup_limit_counts(how: str, tmp_path: Path) -> None:
    groups, own, free = TREES[how]
    found = free_memory(tree(tmp_path, groups, own))
    assert found.get("cgroup") == free
    assert found["MemAvailable"] == 64 * MIB
    if free:
        with pytest.raises(ArenaError, match=f"cgroup leaves {free} bytes"):
            check_fits(free + 1, "an arena", tmp_path)
        assert check_fits(free, "an arena", tmp_path)["limit"] == "cgroup"
