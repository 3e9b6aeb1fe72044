"""What is said to the cores and what they answer, as texts: tests/supervisor/interaction. After a change that is meant:
python -m tests.supervisor.drive --rewrite, and read the difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.supervisor.drive import TEXTS, play


@pytest.mark.parametrize("path", sorted(TEXTS.glob("*.txt")), ids=lambda path: path.stem)
def test_text(path: Path) -> None:
    assert play(path.read_text()) == path.read_text()
