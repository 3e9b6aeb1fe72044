"""Points that tests place faults at."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_reshard
from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.hooks import POINTS, VARIABLE, arm
from tests.watchdog.world import until

PASSES = """
from elastic_reshard.protocol.hooks import hook
for turn in range(3):
    print(turn, flush=True)
    hook("watchdog.attached")
print("through", flush=True)
"""


def start(armed: object, code: str = PASSES) -> subprocess.Popen[str]:
    env = {**os.environ, VARIABLE: json.dumps(armed)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ran(armed: object, code: str = PASSES) -> tuple[int, str, str]:
    with start(armed, code) as process:
        out, err = process.communicate(timeout=20)
    return process.returncode, out, err


def test_unarmed_nothing_happens_whatever_the_name() -> None:
    assert ran({}, PASSES + 'hook("no.such.point")')[:2] == (0, "0\n1\n2\nthrough\n")


def test_killed_at_the_first_or_at_a_chosen_passing() -> None:
    assert ran({"watchdog.attached": "kill"})[:2] == (-signal.SIGKILL, "0\n")
    assert ran({"watchdog.attached": {"do": "kill", "nth": 3}})[:2] == (-signal.SIGKILL, "0\n1\n2\n")
    assert ran({"watchdog.attached": {"do": "kill", "nth": 4}})[0] == 0
    assert ran({"watchdog.stated": "kill"})[0] == 0


def test_raised() -> None:
    code, out, err = ran({"watchdog.attached": "raise"})
    assert (code, out) == (1, "0\n")
    assert "ProtocolError: raised by a test at watchdog.attached" in err


def test_stopped() -> None:
    with start({"watchdog.attached": "stop"}) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=20)[0].endswith("through\n")


def test_waits_for_a_file(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with start({"watchdog.attached": {"wait": str(gate)}}) as process:
        until(Path(f"{gate}.reached").exists)
        assert process.poll() is None
        gate.touch()
        assert process.communicate(timeout=20)[0].endswith("through\n")


def test_a_file_is_read_anew_when_another_takes_its_place(tmp_path: Path) -> None:
    file, gate = tmp_path / "faults", tmp_path / "gate"
    file.write_text(json.dumps({"watchdog.attached": {"do": {"wait": str(gate)}, "nth": 2}}))
    with subprocess.Popen([sys.executable, "-c", PASSES], env={**os.environ, VARIABLE: f"@{file}"}) as process:
        until(Path(f"{gate}.{process.pid}").exists)
        fresh = tmp_path / "fresh"
        fresh.write_text(json.dumps({"watchdog.attached": "kill"}))
        fresh.replace(file)
        gate.touch()
        assert process.wait(20) == -signal.SIGKILL, "the passing after it is the first"


def test_only_the_first_process(tmp_path: Path) -> None:
    armed = {"watchdog.attached": {"do": "kill", "once": str(tmp_path / "done")}}
    assert ran(armed)[0] == -signal.SIGKILL
    assert ran(armed)[0] == 0


@pytest.mark.parametrize(
    "wrong",
    [{"watchdog.atached": "kill"}, {"watchdog.attached": "explode"}, {"watchdog.attached": {"wait": "x", "more": 1}},
     {"watchdog.attached": {"do": "kill", "when": 1}}],
)  # fmt: skip
def test_what_is_unknown_is_refused(wrong: object) -> None:
    with pytest.raises(ProtocolError):
        arm(json.dumps(wrong))


def test_an_unknown_point_in_the_code_is_refused_when_armed() -> None:
    code, _, err = ran({"watchdog.stated": "kill"}, PASSES + 'hook("no.such.point")')
    assert code == 1
    assert "no.such.point" in err


def test_every_point_is_passed_somewhere_and_every_passed_one_is_known() -> None:
    package = Path(elastic_reshard.__file__).parent
    passed = {
        point
        for source in package.rglob("*.py")
        for point in re.findall(r"(?<![\w.])hook\(\"([a-z._]+)\"\)", source.read_text())
        if source.name != "hooks.py"
    }
    assert passed == POINTS
