"""The shell around `core.step`: one event loop that feeds it, journals what it says, and tells it.

Everything here runs on the loop's thread, but for what joins and compares layouts, which has a thread of its own.
An event is stepped as soon as the loop gets to it; all that came meanwhile are stepped together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from elastic_reshard.errors import Fenced, ProtocolError
from elastic_reshard.protocol.hooks import hook
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.messages import Hello
from elastic_reshard.protocol.view import Farewell, Heard, Told, deflated
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.events import (
    Beaten,
    Cut,
    Effects,
    Event,
    Examine,
    Greeted,
    Match,
    Tick,
)
from elastic_reshard.supervisor.feeds import Deflated, Feed
from elastic_reshard.supervisor.journal import Journal
from elastic_reshard.supervisor.layouts import Layouts
from elastic_reshard.supervisor.metrics import Metrics
from elastic_reshard.supervisor.needed import needed
from elastic_reshard.supervisor.noticing import noticed
from elastic_reshard.supervisor.pace import Pace
from elastic_reshard.supervisor.record import Record
from elastic_reshard.supervisor.recovery import heard
from elastic_reshard.supervisor.requests import Kept, Request, Requests
from elastic_reshard.supervisor.settings import settings_of

__all__ = ["Shell"]

_PRUNE: Final = 60.0  # seconds between looks for layouts that nobody needs
_Waiting = tuple[Event, asyncio.Future[None] | None, Request | None]


class Shell:
    """The state machine of one job in one event loop. `run` drives it; nothing here is for other threads."""

    def __init__(self, job: core.Job, journal: Journal, requests: Sequence[Kept] = ()) -> None:
        self.job, self.journal, self.record = job, journal, Record(job.instance, self._news)
        self.requests = Requests(requests)
        self.feeds: dict[str, Feed] = {}
        self.metrics = Metrics(
            lambda: (self.job, {n: f.waiting_bytes for n, f in self.feeds.items()}, time.monotonic())
        )
        self._inbox: list[_Waiting] = []
        self._pace = Pace(job.deadlines.beat)
        self._wake = asyncio.Event()
        self._pulse = asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unwritten: Told | None = None
        self._unsettled = False
        self._unkept: list[Kept] = []
        self._text: tuple[int, int, str] = (0, 0, "")
        self.told_text = Deflated(self.view_text)
        self._layouts = Layouts(journal)
        self._prune_at = time.monotonic() + _PRUNE
        self._examining: dict[str, Examine] = {}
        self._awaiting: dict[Examine | Match, set[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- events in

    def submit(self, event: Event) -> None:
        """Step this event as soon as the loop gets to it; a mere sign of life at the next look at the clock."""
        self._inbox.append((event, None, None))
        if not isinstance(event, Beaten):
            self._wake.set()

    @property
    def ended(self) -> bool:
        """Whether it steps no more."""
        return self._ended.done()

    @property
    def undecided(self) -> tuple[str, str]:
        """Why nothing is decided yet, and how far that is; ("", "") if it is. Meanwhile nothing is put on disk."""
        if not self.job.recover_from:
            return "", ""
        came = heard(self.job.members)
        return (
            "its journal was lost, and it decides nothing until its members are back",
            f"{came} of {self.job.recover_from} members have said what they have",
        )

    async def settle(self, event: Event, request: Request | None = None) -> None:
        """Step this event and return when its effects are on disk and told. ProtocolError if this supervisor ends before.

        request: the named call that wants it. It acts once: of one that has acted before nothing is stepped."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.ended:
            raise _over()
        before = self.requests.act(request, done) if request is not None else None
        if before is not None:
            await asyncio.shield(before)
            return
        self._inbox.append((event, done, request))
        self._wake.set()
        await done

    async def changed(self, unless: Callable[[], bool], within: float) -> None:
        """Return when `unless` holds, `within` seconds have passed or this supervisor ends; it is asked after every step
        that changed anything."""
        try:
            async with asyncio.timeout(within):
                while not unless() and not self.ended:
                    await self._pulse.wait()
        except TimeoutError:
            return

    async def run(self) -> None:
        """Step until `stop`, or until this supervisor must not go on: Fenced, or ProtocolError from the journal."""
        ticks = asyncio.create_task(self._tick())
        try:
            while not self.ended:
                await self._wake.wait()
                await self._gathered()
                self._wake.clear()
                began = time.monotonic()
                self._step()
                self._pace.took(time.monotonic() - began)
            self._ended.result()
        finally:
            ticks.cancel()
            for task in self._tasks:
                task.cancel()
            _give_up(self._inbox)

    async def _gathered(self) -> None:
        """Wait for what comes with what has come, as long as it comes and a step costs more than the wait."""
        until, before = time.monotonic() + self._pace.gather, -1
        while len(self._inbox) != before and not self.ended:
            before = len(self._inbox)
            await asyncio.sleep(self._pace.pause)
            if time.monotonic() >= until:
                return

    def stop(self, error: Exception | None = None) -> None:
        """End `run`, with this error if one is given. The first call counts."""
        if not self.ended:
            self._ended.set_exception(error) if error is not None else self._ended.set_result(None)
        self._wake.set()
        self._pulse.set()

    def close(self, flush: bool) -> None:
        """After `run`: write what was told and needed no disk (unless this supervisor is fenced), and close the journal."""
        self._layouts.close()
        if flush and self._unwritten is not None and not self.job.recover_from:
            self.journal.write(self._unwritten, self.job.weight_version)
        self.journal.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._pace.idle)
            self.submit(Tick())
            if time.monotonic() >= self._prune_at:
                self._prune()

    def _prune(self) -> None:
        """Forget layouts that nobody needs any more. While a journal is being recovered that is not known."""
        now = time.monotonic()
        self._prune_at = now + _PRUNE
        if self.ended or self.job.recover_from:
            return
        try:
            gone = self._layouts.prune(needed(self.job), now)
        except (Fenced, ProtocolError) as error:
            self.stop(error)
            return
        if gone:
            self.record.add("layouts.forgotten", {"bodies": gone})

    # -- one step

    def _step(self) -> None:
        inbox, self._inbox = self._inbox, []
        was_recovering = self.job.recover_from > 0
        try:
            events, now = [event for event, _, _ in inbox], time.monotonic()
            job, effects = core.step(self.job, events, now, self._layouts.covers)
            self._unkept += [request.kept for _, _, request in inbox if request is not None]
            self._write(job, effects, now=was_recovering and not job.recover_from)
        except (Fenced, ProtocolError) as error:
            self.stop(error)
            _give_up(inbox)
            return
        before, self.job = self.job, job
        self._tell(effects)
        questions: tuple[Examine | Match, ...] = (*effects.examine, *effects.match)
        for question in questions:
            self._ask(question)
        happened = tuple(noticed(events, effects.happened, before, job))
        for one in happened:
            self.record.add(one.event, one.fields)
        self.metrics.stepped(events, happened, before, job, now)
        if effects.told is not None or effects.settings:
            self._news()
        for _, done, _ in inbox:
            if done is not None and not done.done():
                done.set_result(None)

    def _news(self) -> None:
        """Wake who waits for news."""
        self._pulse.set()
        self._pulse = asyncio.Event()

    def _write(self, job: core.Job, effects: Effects, now: bool) -> None:
        """On disk before anyone is told. While a lost journal is being recovered nothing is written: a start in the middle
        of that must begin it again."""
        if effects.told is not None:
            self._unwritten = _merged(self._unwritten, effects.told)
        self._unsettled |= effects.settings
        view = self._unwritten is not None and (effects.durable or now)
        if job.recover_from or not (view or self._unsettled or self._unkept):
            return
        self.journal.write(
            self._unwritten, job.weight_version, settings_of(job) if self._unsettled else None, self._unkept
        )
        self._unwritten, self._unsettled, self._unkept = None, False, []
        hook("supervisor.journaled")

    def keep(self, request: Request, status: int, answer: bytes) -> None:
        """How a named call was answered, for whoever repeats it. Fenced and ProtocolError end this supervisor, as in a step."""
        if self.ended or not self.requests.answered(request, status, answer):
            return
        try:
            if self.job.recover_from:
                self._unkept.append(request.kept)
            else:
                self.journal.write(None, self.job.weight_version, requests=[request.kept])
        except (Fenced, ProtocolError) as error:
            self.stop(error)

    def _tell(self, effects: Effects) -> None:
        fresh = [feed for host in effects.snapshots if (feed := self.feeds.get(host)) is not None]
        for feed in fresh:
            feed.refresh()
        if effects.told is not None and self.feeds:
            text = deflated(effects.told.model_dump_json())
            for feed in self.feeds.values():
                if feed not in fresh:
                    feed.tell(text)
        for host, numbers in effects.heard.items():
            if (feed := self.feeds.get(host)) is not None:
                feed.hear(numbers)
        for host in effects.silent:
            if (feed := self.feeds.get(host)) is not None:
                feed.end(self.farewell_text(f"host {host} was silent and is given up; connect anew"))
        if effects.told is not None:
            hook("supervisor.told")

    def view_text(self) -> str:
        """The whole view as JSON, made once for each revision."""
        key = (self.job.term, self.job.revision)
        if self._text[:2] != key:
            self._text = (*key, core.snapshot(self.job).model_dump_json())
        return self._text[2]

    def heard_text(self, numbers: Mapping[str, int]) -> str:
        """A Heard message of the view that was told last."""
        job = self.job
        return Heard(
            term=job.term, instance=job.instance, revision=job.revision, numbers=dict(numbers)
        ).model_dump_json()

    def farewell_text(self, reason: str, over: bool = False) -> str:
        """A Farewell message."""
        said = Farewell(term=self.job.term, instance=self.job.instance, over=over, reason=reason[:4096])
        return said.model_dump_json()

    # -- hosts

    def greet(self, hello: Hello, feed: Feed) -> None:
        """A host's first message. ProtocolError: this host is not to be served, the message is what it is told; Fenced: nor
        is any other, this supervisor has stopped."""
        self._check(hello)
        old = self.feeds.get(hello.host)
        if old is not None and old is not feed:
            quiet = asyncio.get_running_loop().time() - old.last_heard
            if old.machine != hello.machine and quiet < 2 * self.job.deadlines.beat:
                raise ProtocolError(
                    f"host label {hello.host} is in use by another machine ({old.machine}); give each machine its own label"
                )
            old.end(self.farewell_text("another connection of this host took its place"))
        self.feeds[hello.host] = feed
        self.submit(Greeted(hello))

    def gone(self, feed: Feed, why: str) -> None:
        """A connection has ended. One that was replaced does not count."""
        if self.feeds.get(feed.host) is feed:
            del self.feeds[feed.host]
            self.record.add("host.cut", {"host": feed.host, "reason": why})
            self.submit(Cut(feed.host))

    def _check(self, hello: Hello) -> None:
        job = self.job
        term, instance = hello.obeyed
        if hello.protocol != PROTOCOL:
            raise ProtocolError(
                f"this supervisor speaks protocol {PROTOCOL}, host {hello.host} speaks {hello.protocol}"
            )
        if hello.job != job.name:
            raise ProtocolError(f"this supervisor is job {job.name!r}, host {hello.host} belongs to job {hello.job!r}")
        if job.recover_from and term >= job.term and instance != job.instance:
            self._outbid(term)
        elif term > job.term:
            error = Fenced(
                f"host {hello.host} has obeyed term {term} of job {job.name}, this supervisor has {job.term}: another one is "
                "or was in charge. This one ends; if the journal was lost, start with --recover-from-members N."
            )
            self.stop(error)
            raise error
        elif term == job.term and instance not in ("", job.instance):
            raise ProtocolError(
                f"host {hello.host} obeys another supervisor of term {term} (instance {instance}); end that one, or start this "
                "one on its journal"
            )

    def _outbid(self, term: int) -> None:
        """While a lost journal is being recovered: a term above what hosts obeyed, so that they obey this one."""
        try:
            raised = self.journal.raise_term(self.job.instance, above=term)
        except (Fenced, ProtocolError) as error:
            self.stop(error)
            raise
        self.record.add("supervisor.term_raised", {"was": self.job.term, "now": raised, "obeyed": term})
        self.job = replace(self.job, term=raised)
        for feed in self.feeds.values():
            feed.refresh()

    # -- layouts

    def body_comes(self, key: str) -> None:
        """A fragment is going to be written: it is not to be forgotten, if it is there already."""
        self._layouts.touch(key)

    def body_came(self, key: str) -> None:
        """A fragment or layout is in the journal: ask again what waited for it."""
        self._layouts.touch(key)
        for question in [q for q, missing in self._awaiting.items() if key in missing]:
            self._awaiting[question].discard(key)
            if not self._awaiting[question]:
                del self._awaiting[question]
                self._ask(question)

    def _ask(self, question: Examine | Match) -> None:
        if isinstance(question, Examine):
            self._examining[question.group] = question
            for old in [q for q in self._awaiting if isinstance(q, Examine) and q.group == question.group]:
                del self._awaiting[old]
        self._start(self._examine(question) if isinstance(question, Examine) else self._match(question))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop(error if isinstance(error, Exception) else None)

    def _wait_for(self, question: Examine | Match, missing: set[str]) -> None:
        """Members send bodies again to each new supervisor; until then the question stays."""
        self._awaiting[question] = missing
        self.record.add("layouts.awaited", {"question": str(question)[:512], "missing": sorted(missing)})

    async def _examine(self, asked: Examine) -> None:
        wanted = {key for pair in asked.fragments for key in pair if key is not None}
        found = await self._layouts.in_thread(self._layouts.examine, asked)
        if self._examining.get(asked.group) is not asked:
            return
        if isinstance(found, set):
            still = {key for key in found & wanted if self.journal.fragment(key) is None}
            self._wait_for(asked, still) if still else self._ask(asked)
            return
        del self._examining[asked.group]
        self.submit(found)
        for key in (found.source_layout, found.destination_layout):
            if key is not None:
                self.body_came(key)

    async def _match(self, asked: Match) -> None:
        found = await self._layouts.in_thread(self._layouts.match, asked)
        if isinstance(found, set):
            self._wait_for(asked, found)
        else:
            self.submit(found)


def _over() -> ProtocolError:
    return ProtocolError("this supervisor is ending and has not taken this in; ask the one that comes next")


def _give_up(inbox: list[_Waiting]) -> None:
    for _, done, _ in inbox:
        if done is not None and not done.done():
            done.set_exception(_over())


def _merged(before: Told | None, told: Told) -> Told:
    """What was told since the last write, as one: documents are whole, so the later one stands."""
    if before is None:
        return told
    kinds = ("members", "groups", "publications", "transfers")
    return told.model_copy(update={kind: {**getattr(before, kind), **getattr(told, kind)} for kind in kinds})
