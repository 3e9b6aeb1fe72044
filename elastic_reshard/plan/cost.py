"""What a plan costs: bytes per link class and member, and the least that any plan could do.

Counted for all members at once from the same routing that slices are made of, without building a slice. The lower bound
is counted from regions and holders alone, so that it can disagree with the routing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_reshard.errors import PlanError
from elastic_reshard.layout.table import Int, volumes
from elastic_reshard.plan.geometry import Geometry
from elastic_reshard.plan.landing import CellRoutes, landed_cells
from elastic_reshard.plan.legs import Kind
from elastic_reshard.plan.overlap import ragged
from elastic_reshard.plan.plan import Plan
from elastic_reshard.plan.routing import Routes

__all__ = ["Cost", "Links", "Times", "Traffic", "cost"]

_Float = npt.NDArray[np.float64]

# Most (atom, group) pairs that are held in memory at once: about 200 MB.
_BATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Links:
    """Speeds of one member's links, bytes per second: `net` between domains, `near` inside one. PlanError below 0."""

    net: float
    near: float

    def __post_init__(self) -> None:
        if not (self.net > 0 and self.near > 0):
            raise PlanError(f"link speeds must be above 0 bytes/s, got net={self.net} near={self.near}")


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds below which the plan's bytes cannot move, however well everything overlaps.

    ingress: per domain, what enters it over all network links of its members. receiver, sender: the busiest member's
    own network link. near: the busiest member's pulls inside its domain.
    """

    ingress: _Float  # [domains]
    receiver: float
    sender: float
    near: float

    @property
    def bound(self) -> float:
        """The largest of all."""
        return max(float(self.ingress.max(initial=0.0)), self.receiver, self.sender, self.near)


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes of one link class by member: sent by (or read from) it, and received (or read) by it. int64 [members]."""

    sent: Int
    received: Int

    @property
    def total(self) -> int:
        """Bytes of all members together."""
        return int(self.received.sum())


@dataclass(frozen=True, eq=False)
class Cost:
    """Bytes that a plan moves, transfer and install together.

    links: by kind. SELF stays in its member, LOCAL is pulled inside a domain from a source, NET enters a domain, LANDED
    is pulled inside a domain from the member that received it.
    ingress, need: network bytes into each domain, and the least that must enter it, int64 [domains]: the distinct bytes
    of each destination layout that its members want, less what its own sources (and its landed cells) hold.
    pairs: (sender, receiver) pairs with network bytes. messages: at least so many; rounds and packing may cut more.
    holders, seekers: present members that hold, and that want, anything.
    """

    links: Mapping[Kind, Traffic]
    ingress: Int
    need: Int
    rounds: int
    pairs: int
    messages: int
    holders: Int
    seekers: Int
    domains: Int  # [members]

    @property
    def net(self) -> int:
        """Network bytes in total."""
        return self.links[Kind.NET].total

    @property
    def lower_bound(self) -> int:
        """The least that must cross the network."""
        return int(self.need.sum())

    @property
    def ratio(self) -> float:
        """Network bytes over the lower bound; 1.0 when nothing has to move and nothing does."""
        if not self.lower_bound:
            return 1.0 if not self.net else float("inf")
        return self.net / self.lower_bound

    @property
    def source_balance(self) -> float:
        """Largest over mean network bytes sent, among all that hold anything; 1.0 where nothing is sent."""
        return _balance(self.links[Kind.NET].sent[self.holders])

    @property
    def receiver_balance(self) -> float:
        """Largest over mean network bytes received, among all that want anything; 1.0 where nothing is received."""
        return _balance(self.links[Kind.NET].received[self.seekers])

    def times(self, links: Links) -> Times:
        """Lower bounds in seconds, given link speeds."""
        members = np.bincount(self.domains, minlength=len(self.ingress))
        net = self.links[Kind.NET]
        near = self.links[Kind.LOCAL].received + self.links[Kind.LANDED].received
        return Times(
            self.ingress / (np.maximum(1, members) * links.net),
            int(net.received.max(initial=0)) / links.net,
            int(net.sent.max(initial=0)) / links.net,
            int(near.max(initial=0)) / links.near,
        )


def _balance(load: Int) -> float:
    return float(load.max() / load.mean()) if load.any() else 1.0


class _Tally:
    """Sums of bytes, by kind and member, and by pair."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.sent = np.zeros((len(Kind), members), dtype=np.int64)
        self.received = np.zeros((len(Kind), members), dtype=np.int64)
        self._pairs: list[tuple[Int, Int]] = []
        self._pending = 0

    def move(self, kind: Kind, sender: Int, receiver: Int, nbytes: Int) -> None:
        """Row i moves nbytes[i]."""
        np.add.at(self.sent[kind], sender, nbytes)
        np.add.at(self.received[kind], receiver, nbytes)
        if kind == Kind.NET:
            self._pairs.append(_summed(sender * self.members + receiver, nbytes))
            self._pending += len(self._pairs[-1][0])
            if self._pending > 4 * _BATCH:
                self._pairs = [self.pairs]
                self._pending = len(self._pairs[0][0])

    @property
    def pairs(self) -> tuple[Int, Int]:
        """(sender * members + receiver, network bytes) of each pair that has any."""
        empty = np.zeros(0, dtype=np.int64)
        keys, nbytes = (np.concatenate([empty, *(part[i] for part in self._pairs)]) for i in (0, 1))
        return _summed(keys, nbytes)


def _summed(keys: Int, nbytes: Int) -> tuple[Int, Int]:
    distinct, at = np.unique(keys[nbytes > 0], return_inverse=True)
    total = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(total, at, nbytes[nbytes > 0])
    return distinct, total


def cost(plan: Plan) -> Cost:
    """Count a whole plan. Pure; seconds for 10,000 members and hundreds of tensors, milliseconds for hundreds of members."""
    tally = _Tally(plan.topology.size)
    domains = int(plan.topology.array.max(initial=-1)) + 1
    need = np.zeros(domains, dtype=np.int64)
    of_tensor = np.asarray(plan.geometry_of, dtype=np.int64)
    for number, g in enumerate(plan.geometries):
        tensors = np.flatnonzero(of_tensor == number)
        if plan.options.landing:
            _landing(plan, g, tensors, tally, need)
        else:
            _streaming(g, plan.turns[tensors], tally)
            np.add.at(need, *_needed(g, len(tensors)))
    links = {kind: Traffic(tally.sent[kind], tally.received[kind]) for kind in Kind}
    ingress = np.zeros(domains, dtype=np.int64)
    np.add.at(ingress, plan.topology.array, links[Kind.NET].received)
    _, by_pair = tally.pairs
    return Cost(
        links,
        ingress,
        need,
        plan.rounds.count,
        len(by_pair),
        int((-(-by_pair // plan.options.message)).sum()),
        _distinct([g.holders.member for g in plan.geometries]),
        _distinct([g.seekers.member for g in plan.geometries]),
        plan.topology.array,
    )


def _distinct(parts: list[Int]) -> Int:
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(np.unique(p) for p in parts)]))


def _needed(g: Geometry, tensors: int) -> tuple[Int, Int]:
    """(domain, bytes) of each group: its region less what sources of its domain hold, for so many tensors."""
    s = g.seekers
    wanted = volumes(s.lo, s.hi)[s.region]
    atoms = g.atoms(np.arange(len(s.lo), dtype=np.int64))
    stride = max(1, len(s.region))
    group = s.group_at(atoms.region[atoms.entry_atom], g.domains[atoms.member])
    own = np.unique(atoms.entry_atom[group >= 0] * stride + group[group >= 0])  # replicas in one domain count once
    np.subtract.at(wanted, own % stride, atoms.numel[own // stride])
    return s.domain, wanted * g.itemsize * tensors


def _batches(g: Geometry) -> Iterator[Int]:
    """Regions, a bounded number of (atom, group) pairs at a time; atoms of a region are guessed from the average."""
    s = g.seekers
    if not len(s.lo):
        return
    groups = np.diff(s.groups)
    guess = np.cumsum(groups * (1 + len(g.holders.lo) // len(s.lo)))
    cuts = np.searchsorted(guess, np.arange(_BATCH, guess[-1] + 1, _BATCH))
    for part in np.split(np.arange(len(s.lo), dtype=np.int64), np.unique(cuts)):
        if len(part):
            yield part


def _periodic(turns: Int, moduli: Int) -> list[tuple[int, int]]:
    """(turn, how many tensors have it), turns that mean the same for all of these label counts taken together."""
    period = 1
    for n in np.unique(moduli).tolist():
        period = int(np.lcm(period, n)) if n and period < 1 << 31 else period
    if period >= 1 << 31:
        period = int(turns.max(initial=0)) + 1
    found, counts = np.unique(turns % period, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def _streaming(g: Geometry, turns: Int, tally: _Tally) -> None:
    for regions in _batches(g):
        routes = Routes(g.atoms(regions))
        a, s = routes.atoms, g.seekers
        atom, group = ragged(np.diff(s.groups)[a.region], s.groups[a.region])
        for begin in range(0, len(atom), _BATCH):
            part = slice(begin, begin + _BATCH)
            at = routes.local_at(atom[part], group[part])
            _entering(routes, atom[part][at < 0], group[part][at < 0], turns, tally)
            _staying(routes, atom[part][at >= 0], group[part][at >= 0], at[at >= 0], turns, tally)


def _entering(routes: Routes, atom: Int, group: Int, turns: Int, tally: _Tally) -> None:
    """Over the network to one member of the group, and from there to the others."""
    a, s = routes.atoms, routes.seekers
    pieces = routes.remote(atom, group)
    atom, group = atom[pieces.pair], group[pieces.pair]
    nbytes = _bytes(routes, atom, pieces.first, pieces.last)
    copies, width = a.copies[atom], s.width[group]
    entered = np.zeros(len(s.region), dtype=np.int64)
    for turn, count in _periodic(turns, np.concatenate([np.unique(copies), np.unique(width)])):
        sender = a.member[a.ptr[atom] + (pieces.source + turn) % copies]
        receiver = s.member[s.ptr[group] + (pieces.receiver + turn) % width]
        tally.move(Kind.NET, sender, receiver, nbytes * count)
        np.add.at(tally.sent[Kind.LANDED], receiver, nbytes * count * (width - 1))
        np.subtract.at(tally.received[Kind.LANDED], receiver, nbytes * count)  # added with all of its group below
    np.add.at(entered, group, nbytes * len(turns))
    np.add.at(tally.received[Kind.LANDED], s.member, entered[s.entry_group])


def _staying(routes: Routes, atom: Int, group: Int, at: Int, turns: Int, tally: _Tally) -> None:
    """Out of sources in the reader's own domain, or the reader itself."""
    a, s = routes.atoms, routes.seekers
    which, reader = ragged(s.width[group], s.ptr[group])
    own = _holds(routes, atom[which], s.member[reader])
    mine = s.member[reader[own]]
    tally.move(Kind.SELF, mine, mine, a.numel[atom[which[own]]] * a.geometry.itemsize * len(turns))
    which, reader = which[~own], reader[~own]
    pieces = routes.local(at[which], reader - s.ptr[group[which]])
    pair = which[pieces.pair]
    first, count = routes.local_holders(at[pair])
    nbytes = _bytes(routes, atom[pair], pieces.first, pieces.last)
    for turn, times in _periodic(turns, count):
        source = a.geometry.holders.member[routes.local_entry[first + (pieces.source + turn) % count]]
        tally.move(Kind.LOCAL, source, s.member[reader[pieces.pair]], nbytes * times)


def _landing(plan: Plan, g: Geometry, tensors: Int, tally: _Tally, need: Int) -> None:
    """Transfer and install of a geometry's tensors: those of which nothing landed are routed alike, but for turns."""
    target = plan.tensors[tensors[0]].target
    grid = plan.cells[target]
    fresh, alone = [], []
    for t in tensors.tolist():
        landed = landed_cells(g, grid, grid.index[plan.tensors[t].name], target, plan.ledger)
        if landed is None:
            fresh.append(t)
        else:
            alone.append(([t], landed))
    for regions in _batches(g):
        routes = Routes(g.atoms(regions))
        for alike, landed in [(fresh, None), *alone] if fresh else alone:
            number = grid.index[plan.tensors[alike[0]].name]
            cells = CellRoutes(routes, regions, grid, number, landed)
            _lacking(cells, need, len(alike))
            for turn, count in zip(*np.unique(plan.turns[alike], return_counts=True), strict=True):
                _landed_once(cells, turn[None], int(count), tally)
                _installed(cells, turn[None], int(count), tally)


def _lacking(cells: CellRoutes, need: Int, tensors: int) -> None:
    """What of its cells each domain lacks: those not landed there, less what its sources hold."""
    item = cells.atoms.geometry.itemsize
    slot = np.flatnonzero(~cells.present)
    domain = cells.s.domain[cells.slot_group]
    np.add.at(need, domain[slot], cells.numel[cells.slot_cell[slot]] * item * tensors)
    pair, group = cells.routes.local_groups(cells.pairs.atom)
    slot = cells.slot_of(cells.pairs.cell[pair], group)
    held = ~cells.present[slot]
    np.subtract.at(need, domain[slot[held]], cells.pairs.numel[pair[held]] * item * tensors)


def _landed_once(cells: CellRoutes, turn: Int, count: int, tally: _Tally) -> None:
    """What enters the domains, and what they gather from their own sources to make their cells whole."""
    item, s = cells.atoms.geometry.itemsize, cells.s
    slot, pair = cells.shipments()
    sender = cells.member_of(*cells.picked(slot, pair, turn))[0]
    whole = cells.numel[cells.slot_cell[slot]]
    numel = np.where(pair < 0, whole, cells.pairs.numel[pair]) if len(cells.pairs.atom) else whole
    tally.move(Kind.NET, sender, s.member[cells.receiver_of(slot, turn)[0]], numel * item * count)
    slot, pair = cells.gathering()
    _pulled(cells, slot, pair, s.member[cells.receiver_of(slot, turn)[0]], turn, count, tally)


def _installed(cells: CellRoutes, turn: Int, count: int, tally: _Tally) -> None:
    """What every member pulls when it installs."""
    item, s = cells.atoms.geometry.itemsize, cells.s
    row, reader = ragged(s.width[cells.slot_group], s.ptr[cells.slot_group])
    for chosen, holder in (
        (cells.present[row], cells.present_holder),
        (cells.lands[row], lambda slot, _, turns: cells.receiver_of(slot, turns)),
    ):
        slot = row[chosen]
        owner = holder(slot, reader[chosen], turn)[0]
        nbytes = cells.numel[cells.slot_cell[slot]] * item * count
        tally.move(Kind.LANDED, s.member[owner], s.member[reader[chosen]], nbytes)
    near = ~cells.present[row] & ~cells.lands[row]
    at, pair = cells.pairs_of(row[near])
    _pulled(cells, row[near][at], pair, s.member[reader[near][at]], turn, count, tally)


def _pulled(cells: CellRoutes, slot: Int, pair: Int, reader: Int, turn: Int, count: int, tally: _Tally) -> None:
    """Pairs out of source memory in the domain, or in the reader itself."""
    entry = cells.near_source(slot, pair, reader, np.broadcast_to(turn, slot.shape))
    owner = cells.atoms.geometry.holders.member[entry]
    nbytes = cells.pairs.numel[pair] * cells.atoms.geometry.itemsize * count
    own = owner == reader
    tally.move(Kind.SELF, owner[own], reader[own], nbytes[own])
    tally.move(Kind.LOCAL, owner[~own], reader[~own], nbytes[~own])


def _holds(routes: Routes, atom: Int, member: Int) -> npt.NDArray[np.bool_]:
    a = routes.atoms
    stride = len(a.geometry.domains)
    held: npt.NDArray[np.bool_] = np.isin(atom * stride + member, a.entry_atom * stride + a.member)
    return held


def _bytes(routes: Routes, atom: Int, first: Int, last: Int) -> Int:
    """Bytes of quanta first:last of each atom."""
    a = routes.atoms
    quantum, numel = a.quantum[atom], a.numel[atom]
    moved: Int = np.minimum(last * quantum, numel) - np.minimum(first * quantum, numel)
    return moved * a.geometry.itemsize
