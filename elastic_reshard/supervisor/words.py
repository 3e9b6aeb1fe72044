"""What an event of the record says to a person, in one line. Pure.

The page and `elastic-reshard watch` show these; programs read the events themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

__all__ = ["Words", "plain", "size", "told"]

Tone = Literal["none", "calm", "good", "late", "bad"]
Fields = Mapping[str, Any]
_INCARNATION: Final = re.compile(r"@[0-9a-f]{16}\b")
_PLANNED: Final = re.compile(r"its member is gone|the watchdog goes")  # a mover's end that is nobody's loss
_LEFT: Final = re.compile(r"left|asked to leave|its host keeps")  # a member's end that somebody wanted
_QUIET: Final = frozenset({"group.landing", "group.complete", "group.installing", "group.current", "group.stale"})
_MOST: Final = 600


class Words(NamedTuple):
    """tone: how it is to be shown; fault: it is marked on the timeline of refits."""

    tone: Tone
    text: str
    fault: bool = False


def plain(text: object) -> str:
    """Members by the names that people gave them."""
    return _INCARNATION.sub("", str(text or ""))


def size(nbytes: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}" if nbytes < 10 and unit != "B" else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def told(event: str, fields: Fields) -> Words | None:
    """One event in words; None for those that others say better. Of an unknown one its name and fields."""
    if event in _QUIET:
        return None
    rule = _RULES.get(event)
    if rule is None:
        said = " ".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in fields.items())
        return Words("none", plain(f"{event} {said}")[:_MOST])
    found = rule(fields)
    return found._replace(text=plain(found.text)[:_MOST]) if found is not None else None


def _mover(f: Fields) -> Words:
    if _PLANNED.search(f["condemned"]):
        return Words("none", f"the mover of {f['member']} has ended with its member")
    why = f"was condemned: {f['condemned']}" if f["condemned"] else "was killed or ended by itself"
    # Who is not out of a broken epoch in time is a consequence, not the cause.
    caused = "not out of all operations" in f["condemned"]
    return Words("late" if caused else "bad", f"the mover of {f['member']} {why}", not caused)


def _breaking(f: Fields) -> Words:
    # A loss has its own event; a stall, and movers that are not ready or do not stop, have only this one.
    own = ("has ended", "its end was not seen", "can't be reached")
    lost = any(what in f["reason"] for what in own) or f["reason"].startswith("late:")
    return Words("bad", f"the transfer of epoch {f['epoch']} is broken off: {f['reason']}", not lost)


def _joining(f: Fields) -> Words:
    where = f"on {f['host']}" if "host" in f else f"anew: {f['reason']}"
    return Words("calm", f"{f['member']} joins {where}")


def _out(what: str) -> Callable[[Fields], Words]:
    def rule(f: Fields) -> Words:
        if f["was"] == "orphaned" or _LEFT.match(f["reason"]):
            return Words("none", f"{f['member']} {what} ({f['reason']})")
        return Words("bad", f"{f['member']} {what}: {f['reason']}", True)

    return rule


def _over(f: Fields) -> Words:
    text = f"the transfer of epoch {f['epoch']} is over after {f['seconds']:.2f} s, {size(f['bytes_network'])}"
    return Words("good", text) if f["whole"] else Words("late", f"{text}; not whole")


def _verdict(f: Fields) -> Words | None:
    match f["verdict"]:
        case "current":
            return Words("good", f"{f['group']} has installed version {f['version']}")
        case "partial":
            return Words("bad", f"{f['group']} could not install version {f['version']}: {f['reason']}")
    return None


def _left_behind(f: Fields) -> Words:
    if "groups" in f:
        return Words("late", f"late: the others go on without {', '.join(f['groups'])}", True)
    return Words("late", f"{f['group']} is left behind")


def _silent(f: Fields) -> Words:
    if f["members"]:
        return Words("bad", f"host {f['host']} was silent and is given up", True)
    return Words("none", f"host {f['host']} is gone")


def _forming(f: Fields) -> Words:
    return Words(
        "calm",
        f"a transfer forms in epoch {f['epoch']}: {len(f['members'])} movers, to {', '.join(sorted(f['groups']))}",
    )


def _moving(f: Fields) -> Words:
    return Words("calm", f"version {f['version']} ({f['label'] or 'no label'}) of {f['group']} begins to move")


def _say(tone: Tone, text: str, fault: bool = False) -> Callable[[Fields], Words]:
    """A sentence with fields in it."""
    return lambda f: Words(tone, text.format_map(f), fault)


_RULES: Final[Mapping[str, Callable[[Fields], Words | None]]] = {
    "publication.moving": _moving,
    "publication.committed": _say("good", "version {version} is committed"),
    "publication.released": _say("none", "version {version} is released: its slots are free"),
    "publication.abandoned": _say("bad", "version {version} is abandoned: {reason}", True),
    "transfer.forming": _forming,
    "transfer.running": _say("calm", "the transfer of epoch {epoch} runs"),
    "transfer.stopping": _say("late", "the transfer of epoch {epoch} stops: {reason}"),
    "transfer.breaking": _breaking,
    "transfer.over": _over,
    "transfer.suspended": _say("bad", "nobody reachable holds a part: {reason}", True),
    "transfer.given_up": lambda f: Words("bad", f"given up for {', '.join(f['groups'])}: {f['reason']}", True),
    "membership.epoch": _say("calm", "epoch {epoch} of the membership begins"),
    "mover.ended": _mover,
    "mover.unproved": _say("bad", "the mover of {member} hangs in the kernel of {host}: others go on without it", True),
    "member.joining": _joining,
    "member.live": _say("good", "{member} takes part"),
    "member.leaving": _say("calm", "{member} leaves"),
    "member.leave_asked": _say("calm", "{member} was asked to leave within {within} s"),
    "member.refused": _say("bad", "{member} is refused: {reason}", True),
    "member.orphaned": _out("is out, its memory still serves"),
    "member.lost": _out("is out"),
    "member.forfeit": _out("is given up without proof of death"),
    "group.broken": lambda f: Words("bad", f"{f['group']} is broken: without {', '.join(f['missing'])}"),
    "group.admitted": _say("good", "{group} is whole and admitted"),
    "group.gone": _say("none", "{group} is gone"),
    "group.refused": _say("bad", "{group} is refused: {reason}", True),
    "group.partial": _say("bad", "{group} is PARTIAL, it must not serve: {reason}", True),
    "group.left_behind": _left_behind,
    "group.verdict": _verdict,
    "host.silent": _silent,
    "host.cut": _say("late", "the connection of host {host} is gone: {reason}"),
    "host.refused": _say("bad", "a host is refused: {reason}", True),
    "host.drained": _say("calm", "host {host} is to be emptied"),
    "host.undrained": _say("calm", "host {host} may be joined again"),
    "network.fallback": _say("late", "the transfer goes over {network}: {why}"),
    "watchdog.replaced": _say("late", "the watchdog of {host} was replaced", True),
    "supervisor.started": _say("calm", "the supervisor of job {job} starts, term {term}"),
    "supervisor.late": _say("late", "the supervisor itself was {seconds} s late: nobody is judged for two beats"),
}
