"""Movers of which it is not seen that they are out of all operations, nor that they have ended. Pure.

A watchdog condemns a mover that is not out in time, and says so when its end is proved. One that hangs in the kernel is never
proved dead: the others go on without its member, as without one whose host is out of sight. That is safe whatever it does:

- It may write to its member's landing arenas only, and those get nothing new: no watchdog gives a member a second mover, and
  no transfer counts the member as present, nor its ledger as a basis, before the first is out or has ended.
- In the slot that it lands in it writes what is not marked there. Whoever installs reads what is.
- Its peers are out, so nothing of theirs receives any more, and the next communicator has other keys and connections. No
  arena is registered with NCCL, whose kernels write into buffers of the communicator.
"""

from __future__ import annotations

from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.messages import Hello, MoverSaid
from elastic_reshard.supervisor.state import Draft, Job, Transfer

__all__ = ["in_vain", "loose", "named", "not_back", "unproved"]


def not_back(known: MoverSaid | None, said: MoverSaid) -> MoverSaid:
    """What is to be taken of a mover's new word: one that runs, or may, does so until it is out or has ended."""
    same = known is not None and (known.mover, known.transfer, known.state) == (said.mover, said.transfer, "running")
    return said.model_copy(update={"state": "running"}) if same and said.state in ("starting", "ready") else said


def loose(job: Draft | Job, member: str) -> bool:
    """Whether its mover runs a transfer that is not in hand, as far as is known."""
    said = job.movers.get(member)
    return said is not None and said.state == "running" and said.transfer not in job.transfers


def unproved(job: Draft | Job, member: str, now: float) -> bool:
    """Loose, and for longer than its watchdog needs to end it."""
    return loose(job, member) and _had_its_time(job, member, 0.0, now)


def named(draft: Draft, hello: Hello) -> None:
    """A watchdog names all movers that live. One that it does not know has ended, though whoever saw that could not say so."""
    known = {said.member for said in hello.movers}
    for member in draft.members_at(hello.host):
        if member.doc.id not in known and loose(draft, member.doc.id):
            del draft.movers[member.doc.id]


def in_vain(draft: Draft, transfer: Transfer, member: str) -> bool:
    """Whether nobody waits any longer for a mover's way out of a broken transfer: its watchdog is heard, and had all the time
    that it needs to get it out or to prove its end."""
    known = draft.members.get(member)
    host = draft.hosts.get(known.doc.host) if known is not None else None
    heard = host is not None and host.connected and draft.now >= draft.judge_from
    return heard and _had_its_time(draft, member, transfer.since, draft.now)


def _had_its_time(job: Draft | Job, member: str, since: float, now: float) -> bool:
    known = job.members.get(member)
    host = job.hosts.get(known.doc.host) if known is not None else None
    return host is not None and now - max(host.greeted, since) >= _needs(job.deadlines)


def _needs(deadlines: Deadlines) -> float:
    """Seconds that a watchdog needs at most to notice, abort and condemn, and to say so."""
    return deadlines.mover_silent + deadlines.abort + deadlines.proof_of_death + 2 * deadlines.beat
