"""Movers that owe a word: not seen to be out of a transfer that is over, nor to have ended. Who may be counted on. Pure.

What is known of a mover is the latest word of its host's watchdog. It *owes* one while that word says "ready" or "running" of
a transfer that is not in hand (a restarted supervisor may not know that one), or only that it lives (`unheard`), or that it
was condemned and its end was not seen. Nothing else pays than the watchdog's word: "out", "ended", or a Hello that does not
name it. Then, for a member whose memory is there and whose host is in sight:

- Who owes nothing is counted on: it may be in the next transfer.
- Who owes is waited for, as a sound one pays soon: no transfer begins that it would be in. That ends when its watchdog says
  that it saw no end, else `_needs` after this supervisor first knew of it; whatever connects, breaks or is replaced while its
  host stays in sight, that moment stays. In a transfer that breaks, a watchdog that was cut off meanwhile is given the time
  once more, and no more.
- From then on it is *unproved*, until it pays: nobody waits for it, nor for its group where that lacks something, and no
  transfer goes on with its member, as with none whose host is out of sight.

A restarted supervisor hears the same words in the Hellos, and counts once more. A watchdog that came after another expects
the movers in its record, names them, and condemns those that do not come: it comes to the same words by itself. A mover that
still plans ("starting") owes nothing: it has not met anybody, and takes the next task when its plan is made.

To go on without the unproved is safe, whatever they do:

- One may write to its member's landing arenas only, and those get nothing new: no watchdog gives a member a second mover, and
  no transfer counts the member as present, nor its ledger as a basis, before the first is out or has ended.
- In the slot that it lands in it writes what is not marked there. Whoever installs reads what is.
- Its peers are out, so nothing of theirs receives any more, and the next communicator has other keys and connections. No
  arena is registered with NCCL, whose kernels write into buffers of the communicator.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.messages import Hello, MoverSaid
from elastic_reshard.supervisor.state import Draft, Job, Owed, Transfer

__all__ = ["count", "give_up", "in_vain", "latest", "named", "owes", "unproved"]


def latest(known: MoverSaid | None, said: MoverSaid) -> MoverSaid:
    """What is to be taken of a new word: that a mover lives says nothing of one that was heard already."""
    return known if known is not None and said.unheard and known.mover == said.mover else said


def owes(job: Draft | Job, member: str) -> bool:
    """Whether the member's mover owes a word."""
    said = job.movers.get(member)
    if said is None or said.state == "ended":
        return False
    open_ = said.state in ("ready", "running") or said.unheard
    return bool(said.condemned) or (open_ and said.transfer not in job.transfers)


def unproved(job: Draft | Job, member: str) -> bool:
    """Whether it owes a word for so long that nobody waits for it."""
    owed = job.owed.get(member)
    return owed is not None and owed.in_vain and owes(job, member)


def count(draft: Draft) -> None:
    """Begin to count for those who owe a word now, judge those who did, and forget who has paid."""
    for member in list(draft.owed):
        if not owes(draft, member):
            del draft.owed[member]
    for member, said in draft.movers.items():
        if not owes(draft, member):
            continue
        known = draft.owed.get(member)
        if not _in_sight(draft, member):
            if known is not None and not known.in_vain:
                del draft.owed[member]
            continue
        if known is None or (known.mover, known.transfer) != (said.mover, said.transfer):
            known = draft.owed[member] = Owed(said.mover, said.transfer, draft.now + _needs(draft.deadlines, None))
        if not known.in_vain and (said.condemned or draft.now >= known.until):
            give_up(draft, said)


def _in_sight(draft: Draft, member: str) -> bool:
    return member in draft.members and draft.members[member].doc.host in draft.hosts


def give_up(draft: Draft, said: MoverSaid) -> None:
    """Nobody waits any longer for the mover that has said this last."""
    known = draft.owed.get(said.member)
    if known is not None and (known.mover, known.transfer, known.in_vain) == (said.mover, said.transfer, True):
        return
    draft.owed[said.member] = Owed(said.mover, said.transfer, draft.now, in_vain=True)
    draft.log("mover.unproved", member=said.member, transfer=said.transfer, host=draft.members[said.member].doc.host)


def named(draft: Draft, hello: Hello) -> None:
    """A watchdog names all movers that live. One that it does not know has ended, though whoever saw that could not say so."""
    known = {said.member for said in hello.movers}
    for member in draft.members_at(hello.host):
        if member.doc.id not in known and owes(draft, member.doc.id):
            del draft.movers[member.doc.id]


def in_vain(draft: Draft, transfer: Transfer, member: str) -> bool:
    """Whether nobody waits any longer for a mover's way out of a broken transfer: its watchdog saw no end, or had all the time
    that it needs to get it out or to prove its end; once more if it was cut off."""
    said = draft.movers.get(member)
    if said is not None and said.condemned and said.state != "ended":
        return True
    known = draft.members.get(member)
    host = draft.hosts.get(known.doc.host) if known is not None else None
    if host is None or draft.now < draft.judge_from:
        return False
    needs, waited = _needs(draft.deadlines, transfer.doc.network), draft.now - transfer.since
    heard = host.connected and draft.now - host.greeted >= needs
    return (heard and waited >= needs) or waited >= needs + draft.deadlines.evict + needs


def later(draft: Draft, seconds: float) -> None:
    """Nobody was listened to for so long."""
    for member, owed in draft.owed.items():
        draft.owed[member] = replace(owed, until=owed.until + seconds)


def _needs(deadlines: Deadlines, network: str | None) -> float:
    """Seconds that a watchdog needs at most to notice, abort and condemn over a network (None: whichever), and to say so."""
    return deadlines.mover_silent + deadlines.abort_over(network) + deadlines.proof_of_death + 2 * deadlines.beat
