"""What goes wrong, and what operators do. Each by its weight; one that cannot happen now does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.supervisor.events import Abandon, Leave, SetPolicies
from tests.supervisor.sim.house import Watchdog
from tests.supervisor.sim.members import Member
from tests.supervisor.sim.movers import Mover
from tests.supervisor.sim.shell import Supervisor

if TYPE_CHECKING:
    from tests.supervisor.sim.world import World

__all__ = ["happen"]

Fault = Callable[["World"], None]


def happen(world: World) -> None:
    """One of them."""
    world.rng.choices(list(_FAULTS), list(_FAULTS.values()))[0](world)


def _some_member(world: World) -> Member | None:
    members = [m for g in world.gangs for m in g.living]
    return world.rng.choice(members) if members else None


def _dog(world: World) -> Watchdog | None:
    # While a journal is lost only the watchdog knows what was: one loss at a time.
    dogs = [d for d in world.watchdogs.values() if d.alive]
    return None if world.recovering or not dogs else world.rng.choice(dogs)


def _mover(world: World) -> Mover | None:
    """One that works, if any does."""
    movers = [m for m in world.movers.values() if m.alive]
    busy = [m for m in movers if m.work is not None and not m.work.out]
    return world.rng.choice(busy or movers) if movers else None


def _boss(world: World) -> Supervisor | None:
    return world.dial()


def freeze_member(world: World) -> None:
    if (member := _some_member(world)) is not None:
        world.freeze(member)


def kill_member(world: World) -> None:
    if (member := _some_member(world)) is not None:
        member.die()


def kill_gang(world: World) -> None:
    for member in world.rng.choice(world.gangs).living:
        member.die()


def restart_gang(world: World) -> None:
    world.trainer.restart()


def complete_gang(world: World) -> None:
    world.rng.choice(world.gangs).complete()


def sever(world: World) -> None:
    for dog in world.watchdogs.values():
        if dog.uplink is not None and world.rng.random() < 0.7:
            world.clock.note("SEVER", dog.uplink.ends[1].name)
            dog.uplink.sever()


def kill_watchdog(world: World) -> None:
    if (dog := _dog(world)) is not None:
        dog.die()


def freeze_watchdog(world: World) -> None:
    if (dog := _dog(world)) is not None:
        world.freeze(dog)


def kill_supervisor(world: World) -> None:
    if (boss := _boss(world)) is not None:
        world.lose_supervisor(boss, "killed")


def freeze_supervisor(world: World) -> None:
    if (boss := _boss(world)) is not None:
        world.freeze(boss)


def second_supervisor(world: World) -> None:
    if _boss(world) is not None:
        world.start_supervisor()


def lose_journal(world: World) -> None:
    boss = _boss(world)
    knowing = world.knowing(boss) if boss is not None else []
    if knowing:
        world.lose_journal(knowing)


def new_policies(world: World) -> None:
    rng = world.rng
    world.policies = Policies(
        min_groups=rng.choice([0, 1, 2]),
        late_after=rng.choice([0.5, 5.0]),
        install=6.0,
        max_lag=rng.choice([None, 0, 1]),
        gather_window=rng.choice([0.0, 1.0]),
    )
    if (boss := _boss(world)) is not None:
        boss.submit(SetPolicies(world.policies))


def ask_to_leave(world: World) -> None:
    boss, member = _boss(world), _some_member(world)
    if boss is not None and member is not None:
        boss.submit(Leave(members=(member.name,), within=2.0))


def ask_group_to_leave(world: World) -> None:
    if (boss := _boss(world)) is not None:
        boss.submit(Leave(group=world.rng.choice(world.gangs).name, within=2.0))


def leave(world: World) -> None:
    if (member := _some_member(world)) is not None:
        member.leave(3.0)


def abandon(world: World) -> None:
    boss = _boss(world)
    if boss is not None and boss.job.publications:
        boss.submit(Abandon(list(boss.job.publications)[-1]))


def kill_mover(world: World) -> None:
    if (mover := _mover(world)) is not None:
        mover.die()


def freeze_mover(world: World) -> None:
    if (mover := _mover(world)) is not None:
        world.freeze(mover)


def hang_mover(world: World) -> None:
    """In the kernel, for longer than anybody waits, or not so long. No default: it makes every history another one."""
    mover = _mover(world)
    if mover is not None and not mover.hangs:
        mover.hang()
        world.clock.note(mover.name, "HANGS")
        world.clock.after(1.0 + 25.0 * world.rng.random(), mover.come_back)


def slow_mover(world: World) -> None:
    if (mover := _mover(world)) is not None:
        mover.slowness = world.rng.choice([10.0, 10.0, 100.0])
        world.clock.note(mover.name, "SLOW", mover.slowness)


def kill_mover_and_member(world: World) -> None:
    if (mover := _mover(world)) is not None:
        mover.die()
        world.members[mover.member].die()


def lose_host(world: World) -> None:
    """All of its processes at once. Its ranks are started again later, there or elsewhere."""
    host = world.rng.choice(world.hosts)
    if len(world.hosts) > 1 and not world.recovering:
        world.clock.note("HOST LOST", host)
        for proc in world.network.processes(host):
            proc.die("with its host")
        for gang in world.gangs:
            if world.rng.random() < 0.3:
                gang.hosts = [world.rng.choice(world.hosts) if h == host else h for h in gang.hosts]


def freeze_host(world: World) -> None:
    host = world.rng.choice(world.hosts)
    if len(world.hosts) > 1 and not world.recovering:
        for proc in world.network.processes(host):
            world.freeze(proc)


def partition(world: World) -> None:
    """Some hosts are cut off, for a while."""
    if len(world.hosts) > 1 and not world.recovering:
        control, data = world.rng.choice([(True, False), (False, True), (True, True)])
        some = world.rng.sample(world.hosts, world.rng.randint(1, len(world.hosts) // 2))
        world.network.cut(some, control, data)
        world.clock.after(world.rng.choice([0.5, 3.0, 9.0]) * (0.5 + world.rng.random()), world.network.heal)


_FAULTS: Final[dict[Fault, int]] = {
    freeze_member: 8,
    kill_member: 6,
    kill_gang: 2,
    restart_gang: 3,
    complete_gang: 5,
    sever: 4,
    kill_watchdog: 2,
    freeze_watchdog: 2,
    kill_supervisor: 4,
    freeze_supervisor: 2,
    second_supervisor: 2,
    lose_journal: 1,
    new_policies: 2,
    ask_to_leave: 1,
    ask_group_to_leave: 1,
    leave: 1,
    abandon: 1,
    kill_mover: 5,
    freeze_mover: 3,
    slow_mover: 3,
    kill_mover_and_member: 2,
    lose_host: 3,
    freeze_host: 2,
    partition: 4,
}
