"""What the command line shows comes from anywhere: gloo's errors have brackets, and rich would take them for markup."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from elastic_reshard import cli, cli_common, cli_control, cli_doctor, cli_here, cli_watch

SAID = "[/__w/gloo/transport/tcp/pair.cc:537] Connection closed [bold]"


@pytest.mark.parametrize(
    "console",
    [cli._out, cli._err, cli_common.out, cli_common.err, cli_control._out, cli_control._err, cli_doctor._out,
     cli_doctor._err, cli_here._out, cli_here._err, cli_watch._out],
)  # fmt: skip
def test_text_in_tables_and_lines_is_shown_as_it_is(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Any = io.StringIO()
    monkeypatch.setattr(console, "_file", told)
    table = Table("reason")
    table.add_row(SAID)
    console.print(table, width=120)
    console.print(SAID, width=120)
    assert told.getvalue().count(SAID) == 2
