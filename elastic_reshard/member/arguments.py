"""What `join` is given, and what can't work of it."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_reshard.errors import LayoutError
from elastic_reshard.layout import ModelLayout
from elastic_reshard.member.puller import Install
from elastic_reshard.member.stage import STAGES, WINDOWS
from elastic_reshard.member.tensors import Tensors
from elastic_reshard.protocol.base import Role

__all__ = ["Group", "check_arguments"]


@dataclass(frozen=True)
class Group:
    """Members that stand and fall together: a trainer gang, or an engine. This one is rank `rank` of `size`."""

    name: str
    size: int
    rank: int


def check_arguments(
    roles: frozenset[Role],
    group: Group,
    install: Install | None,
    tensors: Tensors | None,
    layout: ModelLayout | None,
    destination_tensors: Tensors | None,
    stage: str,
    window: str | None,
) -> None:
    """LayoutError, naming everything that can't work."""
    faults = []
    if stage not in STAGES:
        faults.append(f"stage is one of {', '.join(STAGES)}, not {stage!r}")
    if window not in WINDOWS:
        faults.append(f'window is "paused", "anytime" or None, not {window!r}')
    if not roles or not roles <= {"source", "destination"}:
        faults.append(f'roles are "source" and "destination", not {sorted(roles)}')
    if not 0 <= group.rank < group.size:
        faults.append(f"rank {group.rank} is none of a group of {group.size}")
    if "source" in roles and tensors is None:
        faults.append("a source gives its tensors")
    both = len(roles) == 2
    if "destination" in roles:
        filled = destination_tensors if both else tensors
        if (filled is None) == (install is None):
            what = "destination_tensors" if both else "tensors"
            faults.append(
                f"a destination gives either {what}, to be filled in place, or install together with a layout"
            )
    if install is not None and "destination" not in roles:
        faults.append("install is for destinations")
    if faults:
        raise LayoutError("join cannot work: " + "; ".join(faults))
