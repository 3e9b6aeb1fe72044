"""Logs: structlog events with stable names, through the standard library's loggers below "elastic_reshard".

A library prints nothing by itself: events appear when the program configures logging, at the level it chooses.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

__all__ = ["logger"]

# Without a handler of the program's, warnings would go to standard error by the standard library's last resort.
logging.getLogger("elastic_reshard").addHandler(logging.NullHandler())


def logger(room: str) -> Any:
    """The logger of one room. Events are `key=value` lines; epoch, version, member and plan are fields, not text."""
    return structlog.wrap_logger(
        logging.getLogger(f"elastic_reshard.{room}"),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_log_level,
            structlog.processors.KeyValueRenderer(key_order=["event", "member", "plan"], drop_missing=True),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
