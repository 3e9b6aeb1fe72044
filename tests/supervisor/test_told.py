"""What a supervisor lets its HTTP server tell: faults, and not the connections that its own end cuts off."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

import elastic_reshard as er


def test_a_connection_that_the_end_cuts_off_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with er.Supervisor.local(runtime=tmp_path), caplog.at_level(logging.ERROR, "uvicorn.error"):
        for error in (asyncio.CancelledError(), RuntimeError("a fault")):
            logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=error)
    told = [record.exc_info[0] for record in caplog.records if record.name == "uvicorn.error" and record.exc_info]
    assert told == [RuntimeError]
