"""What a communicator is called."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Name"]


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A communicator's name, given by the coordinator, never counted locally."""

    epoch: int
    transfer: str

    def __str__(self) -> str:
        return f"{self.epoch}/{self.transfer}"
