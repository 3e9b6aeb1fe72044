"""How publishes are numbered: the era in the upper bits, the count within it in the lower ones, so that numbers only rise."""

from __future__ import annotations

from typing import Final

__all__ = ["next_era"]

_BITS: Final = 32  # four thousand million publishes of one set of incarnations


def next_era(count_from: int) -> int:
    """Where the next era begins to count."""
    return ((count_from >> _BITS) + 1) << _BITS
