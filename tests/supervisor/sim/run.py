"""Play histories. One again, with all that happened:  python -m tests.supervisor.sim.run SEED"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from tests.supervisor.sim.world import Broken, World

__all__ = ["play", "play_many"]


def play(seed: int, lines: int = 60) -> str:
    """One history; "" if every promise held, else which did not, and the last events."""
    world = World(seed)
    try:
        world.run()
    except Broken as error:
        last = "\n".join(list(world.clock.log)[-lines:])
        return f"history {seed} at {world.clock.now:.3f} s: {error}\n{last}\nagain: python -m tests.supervisor.sim.run {seed}"
    except BaseException as error:
        error.add_note(f"history {seed} at {world.clock.now:.3f} s; again: python -m tests.supervisor.sim.run {seed}")
        raise
    return ""


def _some(seeds: Iterable[int]) -> str:
    return next((text for seed in seeds if (text := play(seed))), "")


def play_many(count: int, processes: int = 2) -> str:
    """Histories 0 to count - 1; the first broken one of each process."""
    parts = [range(start, count, 4 * processes) for start in range(4 * processes)]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return "\n\n".join(filter(None, pool.map(_some, parts)))


if __name__ == "__main__":
    print(play(int(sys.argv[1]), lines=250) or "every promise held")
