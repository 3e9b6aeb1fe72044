"""Each promise of the cores is broken once on purpose, and the interaction texts or the simulator see it."""

from __future__ import annotations

from types import ModuleType

import pytest

from elastic_reshard.member import core as member
from elastic_reshard.protocol import view
from elastic_reshard.supervisor import (
    admission,
    core,
    forgiving,
    holdings,
    installing,
    membership,
    parties,
    publishing,
    queue,
    transfers,
    unproved,
)
from tests.member import test_core
from tests.supervisor import drive
from tests.supervisor import test_core_scenes as scenes
from tests.supervisor.breakages import broken
from tests.supervisor.sim import members as reader
from tests.supervisor.sim.checks import Checks
from tests.supervisor.sim.run import play

# name -> (where, what it says, what it says instead)
BREAKAGES: dict[str, tuple[ModuleType, str, str]] = {
    "a slot is written while a version needs it": (
        member,
        "return never and self.referenced(slot) is None",
        "return never",
    ),
    "a slot is written though it may still be minted": (
        member,
        "never = group is not None and slot.fill.seq <= group.floor",
        "never = True",
    ),
    "a slot is written before its withdrawal was heard": (
        member,
        "slot.withdrawn <= self.heard)",
        "slot.withdrawn <= self.number)",
    ),
    "a gap in what was told is not noticed": (view, "elif fresh or told.base != self.revision:", "elif fresh:"),
    "a verdict before the last report": (
        installing,
        "elif pulled == len(members):",
        "elif pulled >= len(members) - 1:",
    ),
    "a ticket before all have asked": (
        installing,
        "if group.doc.ticket is not None or len(asks) < len(members):",
        "if group.doc.ticket or not asks:",
    ),
    "a ticket that was decided is taken up again": (
        member,
        "return ticket if ticket.id not in done else None",
        "return ticket",
    ),
    "a decided ticket is stated as undecided": (
        member,
        'update["outcome"] = "none"  # decided',
        "pass  # decided",
    ),
    "a rank that was told CURRENT is forgotten by the next term": (installing, "if told is not None:", "if False:"),
    "a commit before min_groups have it": (
        publishing,
        "if missing or complete < draft.policies.min_groups:",
        "if missing:",
    ),
    "a publish of some ranks is minted at once": (publishing, "if len(ready) == len(era.members):", "if ready:"),
    "a commit is told before it is on disk": (
        publishing,
        "    draft.durable = True\n    draft.put_publication(replace(publication",
        "    draft.put_publication(replace(publication",
    ),
    "a committed version is given up": (
        publishing,
        "if over and publication",
        "if publication.doc.state is PublicationState.COMMITTED and publication",
    ),
    "a slot is given back while a ticket is out": (
        publishing,
        "if over and publication.doc.id not in used:",
        "if over:",
    ),
    "members count on from an older set of ranks": (
        member,
        "self.count = max(self.count, self.count_from) + 1",
        "self.count += 1",
    ),
    "who comes back counts from elsewhere": (admission, "roles or back or not any(", "roles or not any("),
    "a group is whole before all count alike": (
        admission,
        "return all(m.said is not None and m.said.count_from == count_from for m in members)",
        "return True",
    ),
    "a connection that was replaced puts members out": (
        member,
        "return self.farewell is not None and self.farewell.over",
        "return self.farewell is not None",
    ),
    "what a dead gang has published is dropped": (admission, "eras = (*past[-1:], era)", "eras = (era,)"),
    "an epoch for every word": (admission, "draft.epoch_ended |= bool(newcomers)", "draft.epoch_ended = True"),
    "a death ends no epoch": (membership, "draft.epoch_ended = draft.durable = True", "draft.durable = True"),
    "a restarted supervisor believes its journal": (core, "        _reconcile(draft)\n", ""),
    "a group that lost a rank goes on": (
        membership,
        "if group.doc.whole and any(_left_out(m)",
        "if group.doc.whole and all(_left_out(m)",
    ),
    "the dead are never dropped": (membership, "            draft.drop_member(member.doc.id)", "            pass"),
    "finished versions are never forgotten": (
        publishing,
        "        draft.drop_publication(publication_)",
        "        pass",
    ),
    "a frozen rank holds its group's ticket": (installing, "draft.now >= group.ticket_until", "False"),
    "who ended while its host was silent comes back": (
        membership,
        "and m.present]\n",
        "and m.doc.state not in _OUT]\n",
    ),
    "tickets of a group that is new have old names": (installing, "    draft.tickets += 1\n", ""),
    "an epoch forms before the last one's movers are out": (
        transfers,
        "if inside and not all(in_vain(draft, transfer, member) for member in inside):",
        "if False:",
    ),
    "a mover that is never proved dead is waited for for ever": (
        transfers,
        "not all(in_vain(draft, transfer, member) for member in inside)",
        "inside",
    ),
    "a member whose mover is not proved dead takes part": (
        holdings,
        "return in_sight(draft, member) and not unproved(draft, member)",
        "return in_sight(draft, member)",
    ),
    "who hangs before it is ready is tried again and again": (
        unproved,
        "if not known.in_vain and (said.condemned or",
        "if (not known.in_vain and said.state == 'running') and (said.condemned or",
    ),
    "who was ready when a supervisor restarted is forgotten": (
        unproved,
        'said.state in ("ready", "running")',
        'said.state == "running"',
    ),
    "a mover that nobody has heard yet is forgotten": (unproved, " or said.unheard\n", "\n"),
    "a host that connects again and again is waited for for ever": (
        unproved,
        "known is None or (known.mover, known.transfer) != (said.mover, said.transfer)",
        "known is None or (draft.now <= draft.hosts[draft.members[member].doc.host].greeted and not said.condemned)",
    ),
    "who waits beside a late transfer waits for ever": (
        queue,
        "if publication is None:\n        return False\n    served",
        "if True:\n        return False\n    served",
    ),
    "the supervisor's own silence makes others late": (
        forgiving,
        "return min(moment + seconds - counted, draft.now)",
        "return moment",
    ),
    "a landing slot is given to a second version": (
        parties,
        "        used.add(slot)",
        "        pass",
    ),
    "a transfer that was stopped counts as whole": (
        transfers,
        'whole=all(said.outcome == "done" for said in outs)',
        "whole=True",
    ),
    "a host has all though who had it is gone": (holdings, "if all(readable(draft, m) for m in entry.by)", ""),
    "who may have met is not known to the next term": (
        transfers,
        "    draft.durable = True  # who may have the values by which they meet is known to the next term too\n",
        "",
    ),
    "a suspended transfer waits for ever": (transfers, "        if draft.now >= held.until:", "        if False:"),
    "a transfer without a source is tried for ever": (
        transfers,
        "lost = [s.reason for s in",
        "lost = [s.reason for s in [] and",
    ),
    "a mover's end breaks nothing": (transfers, 'if s.state == "ended"\n', 'if s.state == "never"\n'),
    "what had landed is sent again": (parties, "        and said.bits\n    }", "        and False\n    }"),
    "nobody is late": (
        transfers,
        "    slow = stragglers(draft, transfer, reports)",
        "    return\n    slow = stragglers(draft, transfer, reports)",
    ),
    "all wait for who is not ready": (transfers, "    slow = mark_slow(draft, transfer, late)", "    slow = set()"),
    "a replica is lost with another": (holdings, "if left and draft.covers(publication.layout, left):", "if False:"),
    "stopping has no end": (
        transfers,
        "draft.now - transfer.moved >= stall or draft.now - transfer.since >= 2 * stall",
        "False",
    ),
}


ENOUGH = 100  # histories


def _texts() -> str:
    for path in sorted(drive.TEXTS.glob("*.txt")):
        if drive.play(path.read_text()) != path.read_text():
            return path.name
    return ""


def _scenes() -> str:
    """The scenes of test_core_scenes, two of each."""
    for seed in range(2):
        for scene, *more in (
            (scenes.test_without_a_fault_each_cell_enters_a_domain_once,),
            *((scenes.test_one_loss_causes_one_rebuild, loss) for loss in scenes.LOSSES),
            (scenes.test_a_straggler_is_left_behind_and_the_others_commit, 60.0),
            (scenes.test_a_straggler_is_left_behind_and_the_others_commit, 300.0),
            (scenes.test_who_may_have_met_is_waited_for_by_the_next_term_too,),
            (scenes.test_a_shard_that_nobody_holds_is_waited_for_then_given_up_and_everyone_goes_on_serving,),
            (scenes.test_who_is_slow_to_plan_is_not_waited_for,),
            (scenes.test_others_go_on_without_a_mover_that_is_never_proved_dead,),
        ):
            try:
                scene(seed, *more)
            except AssertionError as error:
                return f"{scene.__name__}: {error}"
    return ""


def _histories() -> str:
    return next((found for seed in range(ENOUGH) if (found := play(seed))), "")


@pytest.mark.long
@pytest.mark.parametrize("name", BREAKAGES)
def test_breakage_is_seen(name: str) -> None:
    with broken(*BREAKAGES[name]):
        assert _texts() or _scenes() or _histories()


def test_nothing_is_seen_without_one() -> None:
    assert not _texts()
    assert not _scenes()


# -- the reader's comparison is the last line: it is needed only when something else is broken


def _mixed(monkeypatch: pytest.MonkeyPatch) -> str:
    """A history in which a group was told CURRENT with other bytes, though the owner writes slots that are needed."""
    monkeypatch.setattr(Checks, "writes", lambda self, member, slot: None)
    with broken(member, "return never and self.referenced(slot) is None", "return True"):
        found = (play(seed).partition("\n")[0] for seed in range(ENOUGH))
        return next((line for line in found if "told CURRENT" in line), "")


@pytest.mark.long
def test_slots_written_too_early_are_never_current(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _mixed(monkeypatch)


def test_without_the_comparison_of_generations_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with broken(reader, "elif self._unchanged(call.read):", "elif True:"):
        assert _mixed(monkeypatch)


# -- what only a test of the member or of the view sees


def test_a_member_that_waits_for_its_own_withdrawal_is_seen() -> None:
    with (
        broken(member, "slot.withdrawn = None  # it was minted before that was heard", "pass"),
        pytest.raises(AssertionError),
    ):
        test_core.test_what_was_minted_while_it_was_taken_back_is_not_waited_for(test_core.World())


def test_obeying_an_older_term_is_seen() -> None:
    with broken(view, "return term > self.term or (", "return True or ("), pytest.raises(AssertionError):
        test_core.test_a_farewell_and_a_word_of_an_older_term_are_told_apart(test_core.World())
