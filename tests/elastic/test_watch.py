"""How `watch` ends: quietly for who goes, with NotAMember for who was put out; real members, watchdog and supervisor."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch

import elastic_reshard as er
from elastic_reshard.errors import NotAMember
from elastic_reshard.member.session import Member
from elastic_reshard.watchdog.runtime import running
from tests.elastic.world import until

JOB = "watched"
LAYOUT = er.ModelLayout({"w": er.TensorLayout((4,), "float32", er.Mesh.arange((1,)), (er.Replicate(),))})


class Watching:
    """A member, and what a thread that watches was told, until it ended: by nothing, or by an error."""

    def __init__(self, supervisor: er.Supervisor, runtime: Path, name: str) -> None:
        self.kinds: list[str] = []
        self.error: BaseException | None = None
        self.member: Member = er.join(
            supervisor.url, name=name, role="destination", group=er.Group(name, 1, 0), tensors={"w": torch.zeros(4)},
            layout=LAYOUT, runtime=runtime, host="h",
        )  # fmt: skip
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            self.kinds.extend(event.kind for event in self.member.watch())
        except NotAMember as error:
            self.error = error

    def end(self) -> str:
        """By what it ended; "" for nothing."""
        self._thread.join(10.0)
        assert not self._thread.is_alive(), "watch goes on"
        return "" if self.error is None else str(self.error)


def test_watch_ends_quietly_for_who_goes_and_says_so_to_who_was_put_out(tmp_path: Path) -> None:
    with (
        er.Supervisor.local(job=JOB, runtime=tmp_path) as supervisor,
        er.SupervisorClient(supervisor.url, supervisor.token) as client,
    ):
        put_out, leaves, late, stays = [Watching(supervisor, tmp_path, name) for name in ("a", "b", "c", "d")]
        client.leave_member(put_out.member.id, force=True)
        assert f"{put_out.member.id} is no member any more: left out by force; join again" in put_out.end()
        leaves.member.leave()
        assert leaves.end() == ""
        client.leave_member(late.member.id, within=0.3)
        assert late.end() == "", "it was asked"
        assert late.kinds == ["leave"]
        supervisor.close(over=True)
        assert stays.end() == "", "the job is over"
        began = time.monotonic()
        for one in (put_out, late, stays):
            one.member.leave()
        assert time.monotonic() - began < 15.0, "of a job that is over nobody takes note"
        assert [one.end() != "" for one in (put_out, leaves, late, stays)] == [True, False, False, False]
    until(lambda: running(JOB, "h", tmp_path) is None, "its watchdog has gone", 10.0)


def test_watch_says_so_when_the_host_turns_a_member_out_and_no_supervisor_could_ask_it(tmp_path: Path) -> None:
    with er.Supervisor.local(job=JOB, runtime=tmp_path, deadlines=er.Deadlines(drain=0.3, beat=0.5)) as supervisor:
        one = Watching(supervisor, tmp_path, "a")
        supervisor.close(over=False)
    record = running(JOB, "h", tmp_path)
    assert record is not None
    os.kill(record.pid, signal.SIGTERM)
    assert f"{one.member.id} is no member any more: refused: host h was drained" in one.end()
    one.member.leave()
