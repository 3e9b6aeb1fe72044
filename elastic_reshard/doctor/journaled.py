"""A journal's documents, read beside a supervisor that may be writing it; also of one that has died."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from elastic_reshard.errors import ProtocolError

__all__ = ["read"]

_DOCUMENTS: Final = 20_000
_KNOWN: Final = ("meta", "docs")


def read(path: Path) -> dict[str, Any]:
    """meta: its one row; docs: by kind and id; of other tables only how many rows they have: bodies of layouts are large, and
    answers to named calls are nobody's business here. Blocks for seconds at most. Raises ProtocolError if it cannot be read."""
    if not path.is_file():
        raise ProtocolError(f"there is no journal {path} here; name it with --journal")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=2.0)) as sql:
            sql.row_factory = sqlite3.Row
            tables = [
                row[0] for row in sql.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            ]
            if not set(_KNOWN) <= set(tables):
                raise ProtocolError(
                    f"{path} is no journal of a supervisor: it has the tables {', '.join(tables) or 'none'}"
                )
            found: dict[str, Any] = {"meta": dict(sql.execute("SELECT * FROM meta").fetchone() or {}), "docs": {}}
            for kind, name, body in sql.execute("SELECT kind, id, body FROM docs LIMIT ?", (_DOCUMENTS,)):
                found["docs"].setdefault(kind, {})[name] = json.loads(body)
            # Names of tables come from the file itself.
            others = [table for table in tables if table not in _KNOWN and table.isidentifier()]
            found["rows"] = {table: sql.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in others}
            return found
    except (sqlite3.Error, ValueError) as error:
        raise ProtocolError(f"the journal {path} cannot be read: {error}") from error
