"""Running a program: the rounds of a plan over a network and a domain's memory. Nothing else moves bytes."""

from __future__ import annotations

from elastic_reshard.transport.network import GroupedNetwork
from elastic_reshard.transport.program import Program
from elastic_reshard.transport.rounds import Carriage, Rounds, Tally
from elastic_reshard.transport.streamed import StreamedRounds
from elastic_reshard.transport.watched import Watch, WatchedRounds

__all__ = ["Tally", "run"]


def run(program: Program, carriage: Carriage, deadline: float, watch: Watch | None = None) -> Tally:
    """Carry out all rounds. Collective over the members of the plan; blocks until this member's part is done and
    nobody reads its memory any more, at most until `deadline` (time.monotonic).

    watch: for landing programs, on all members or on none: it is asked before each round and told after it, and each
    round's bytes are sealed by their senders and checked before they count. A network of groups needs one.

    Raises PeerLost or TransferTimeout, which name members; then the carriage has failed, so that nobody waits for this
    member, and destination tensors may be half written. With a watch also DigestMismatch, and TransferError when a sender's
    memory was rewritten meanwhile.
    """
    if watch is None:
        return Rounds(program, carriage, deadline).run()
    try:
        network = carriage.network if any(r.sends or r.receives for r in program.rounds) else None
    except BaseException as error:
        carriage.fail(error)
        raise
    if isinstance(network, GroupedNetwork):
        return StreamedRounds(program, carriage, network, deadline, watch).run()
    return WatchedRounds(program, carriage, deadline, watch).run()
