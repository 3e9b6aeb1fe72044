"""Fixtures of the movers' tests."""

from tests.mover.place import place

__all__ = ["place"]
