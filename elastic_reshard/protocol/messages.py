"""What members, watchdogs and the supervisor say to each other: versioned, validated, JSON. Nothing is unpickled.

Statements are levels, not edges: a member states all of itself each time something changed, numbered, so that a lost,
doubled or late statement does no harm. The supervisor tells its view likewise (`protocol.view`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from elastic_reshard.protocol.base import Count, Hex, MemberName, Message, Name, Role, Text
from elastic_reshard.protocol.docs import GroupDoc, PublicationDoc
from elastic_reshard.protocol.ids import PROTOCOL

__all__ = [
    "Beat",
    "Drain",
    "Ended",
    "Fill",
    "GroupSpec",
    "Hello",
    "Holding",
    "Install",
    "Landing",
    "LedgerSaid",
    "MoverSaid",
    "Reach",
    "Stated",
    "Statement",
    "Up",
    "read_up",
]


class GroupSpec(Message):
    """Of which group of `size` members this one is rank `rank`."""

    name: Name
    size: Annotated[int, Field(ge=1, le=1 << 20)]
    rank: Count


class Fill(Message):
    """A slot that holds one publish of a member, offered to be minted.

    seq: number of the publish in its group, above the group's `count_from`. fragment: content id of the layout fragment
    it was made by. before: a digest of the numbers that this process had offered: unlike ones tell of a call that failed here
    only, after which the same number may be another step.
    stall, nbytes: what the copy cost, for the metrics.
    """

    arena: Hex
    slot: Count
    generation: Count
    seq: Count
    label: Text | None = None
    extras: dict[str, Any] = {}
    fragment: Hex
    before: Count = 0
    stall: float = 0.0
    nbytes: Count = 0


class Install(Message):
    """Where a member is with installing.

    ask: number of its latest install call, 0 for none. asking: that call is under way and would take a ticket.
    patience: seconds that the call has left. ticket: the last it took up; outcome: of that ticket.
    """

    ask: Count = 0
    asking: bool = False
    patience: float = 0.0
    ticket: Text | None = None
    outcome: Literal["none", "pulling", "pulled", "failed"] = "none"
    reason: Text = ""
    seconds: float = 0.0
    nbytes: Count = 0


class Holding(Message):
    """What a member's live tensors hold, by the verdict it was told."""

    weight_version: Count
    publication: Text
    ticket: Text


class Landing(Message):
    """A member's landing arena: its watchdog holds it. cells: of the member's own regions, in cells of `cell` bytes."""

    arena: Hex
    cells: Count
    cell: Count
    nbytes: Count = 0


class Reach(Message):
    """What the driver says of the device that a member's arenas are on. device: its id. peers: other devices of the machine
    whose memory it can map; apart: those whose memory it can't; who is in neither is not known. cluster, clique: of the NVLink
    fabric, if that is up and spans machines; "" and 0 else."""

    device: Text
    peers: tuple[Text, ...] = ()
    apart: tuple[Text, ...] = ()
    cluster: Text = ""
    clique: Count = 0

    @property
    def fabric(self) -> str:
        """Cluster and clique as one text, "" outside a fabric."""
        return f"{self.cluster}/{self.clique}" if self.cluster else ""


class Statement(Message):
    """All that a member says of itself. number: rises with each one of an incarnation; lower ones are dropped.

    source, destination: content ids of its layout fragments (bodies: PUT /v1/fragments/ID), None for a role it has not.
    source_from: the publish from which `source` holds, when a layout changed. count_from: the group's, by which it counts.
    fills: offered slots, at most one a slot; what is not listed is withdrawn. leaving: it wants to go as soon as nothing
    needs it.
    device: the id of the one that its tensors and arenas are on, or that its host arenas are registered with; "" for none.
    networks: what its mover can move over besides gloo, by name: the config that all members must have alike. window: when its
    mover may work: at any time, only while its window is open ("paused"), or so on networks that use the device ("network").
    reach: of one whose arenas are on a device. domain: the label that its user gave its domain, within its host; "" for none.
    """

    member: MemberName
    group: GroupSpec
    roles: frozenset[Role]
    host: Name
    pid: Count
    number: Count
    source: Hex | None = None
    destination: Hex | None = None
    source_from: Count = 0
    count_from: Count = 0
    fills: tuple[Fill, ...] = ()
    install: Install = Install()
    holding: Holding | None = None
    landing: Landing | None = None
    leaving: bool = False
    device: Text = ""
    networks: dict[Name, Text] = {}
    window: Literal["anytime", "paused", "network"] = "anytime"
    reach: Reach | None = None
    domain: Name | Literal[""] = ""


class MoverSaid(Message):
    """Where the mover of a member is with the transfer it was given last, by its watchdog. A level: the latest counts.

    state: "starting" (its process, its mappings, its plan), "ready" (its plan is the told one, its values are here),
    "running" (formed), "out" (out of all operations, its communicator may still be open), "ended" (its process has, by
    proof; whatever it did). outcome: of "out" and "ended". error: an error's name, with its reason. blames: members that it
    knows to be gone or unlike. config: what all movers of a communicator must have alike. began: rounds it has begun; held:
    it begins no more without being told (stopping). waits: (member, cell) it waits for now; its own member: until that opens
    its window. window: what it waits for is that member's window, its own or a peer's. condemned: ended by its watchdog, and
    why; with another state than "ended": it was killed, and its end was not seen in time. to_land: cells that are to land in
    it, by its plan. links: of the bytes received, those of each host; said with "out".
    unheard: it lives, and this watchdog has not heard yet where it is; said in a Hello only, where all that live are named.
    """

    kind: Literal["mover"] = "mover"
    member: MemberName
    mover: Hex
    transfer: Text
    state: Literal["starting", "ready", "running", "out", "ended"]
    outcome: Literal["none", "done", "stopped", "failed", "refused"] = "none"
    error: Text = ""
    reason: Text = ""
    blames: tuple[Text, ...] = ()
    config: Text = ""
    values: dict[str, Text] = {}
    began: Count = 0
    held: bool = False
    cells: Count = 0
    sent: Count = 0
    received: Count = 0
    resent: Count = 0
    seconds: float = 0.0
    waits: tuple[Text, Count] | None = None
    window: bool = False
    condemned: Text = ""
    to_land: Count = 0
    links: dict[Name, Count] = {}
    unheard: bool = False


class LedgerSaid(Message):
    """What a landing slot holds: cells of the member's own regions that have arrived (`protocol.bits`), as its watchdog read
    it. Said before the mover's "out" or "ended", and in every Hello."""

    kind: Literal["ledger"] = "ledger"
    member: MemberName
    arena: Hex
    slot: Count
    publication: Text
    bits: str


class Hello(Message):
    """A watchdog's first message of a connection: everything it knows. `obeyed`: the highest (term, instance) it heard.

    statements: the latest of every member that it serves, dead ones too while their arenas are kept.
    ended: members whose end it has seen. publications, groups, membership_epoch: those of the view it heard last, for a
    supervisor without a journal; of publications that are over not where they had landed.
    """

    kind: Literal["hello"] = "hello"
    protocol: int = PROTOCOL
    job: Name
    host: Name
    machine: Text
    watchdog: Hex
    obeyed: tuple[Count, Text] = (0, "")
    statements: tuple[Statement, ...] = ()
    ended: tuple[MemberName, ...] = ()
    publications: tuple[PublicationDoc, ...] = ()
    groups: tuple[GroupDoc, ...] = ()
    membership_epoch: Count = 0
    movers: tuple[MoverSaid, ...] = ()
    ledgers: tuple[LedgerSaid, ...] = ()


class Stated(Message):
    """A member's statement, passed on."""

    kind: Literal["stated"] = "stated"
    statement: Statement


class Ended(Message):
    """A member's process has ended (pidfd), or its arenas are gone (`arenas_kept` False)."""

    kind: Literal["ended"] = "ended"
    member: MemberName
    arenas_kept: bool = True
    how: Text = ""


class Beat(Message):
    """The watchdog is there. revision: up to where it has heard the view."""

    kind: Literal["beat"] = "beat"
    revision: Count = 0


class Drain(Message):
    """The host is to be emptied: its watchdog was told so (SIGTERM). within: seconds that are left for it. Said once a
    connection."""

    kind: Literal["drain"] = "drain"
    within: Annotated[float, Field(ge=0, le=86_400)]


_Any = Hello | Stated | Ended | Beat | MoverSaid | LedgerSaid | Drain
Up = Annotated[_Any, Field(discriminator="kind")]
_up: TypeAdapter[_Any] = TypeAdapter(Up)


def read_up(raw: str | bytes) -> _Any:
    """One message to the supervisor; pydantic's ValidationError for anything else."""
    return _up.validate_json(raw)
