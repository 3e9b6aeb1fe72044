"""Fixtures of the supervisor's tests."""

from tests.supervisor.real import start

__all__ = ["start"]
