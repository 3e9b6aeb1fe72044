"""One host's queue, without a network: what it keeps, what it drops, and in which order it tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic_reshard.supervisor import feeds
from elastic_reshard.supervisor.feeds import Feed


class Line:
    """A connection that can be full."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.revision = 0

    async def send(self, text: str) -> None:
        await self.open.wait()
        self.sent.append(text)

    def feed(self, patience: float = 5.0) -> Feed:
        return Feed(
            "a", "m", send=self.send, snapshot=lambda: f"view {self.revision}", heard=lambda n: f"heard {dict(n)}",
            patience=patience,
        )  # fmt: skip


def play(scene: Callable[[Line], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scene(Line())

    asyncio.run(main())


async def idle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_nothing_is_told_before_the_view_and_all_that_was_heard_after_it() -> None:
    async def scene(line: Line) -> None:
        feed = line.feed()
        running = asyncio.create_task(feed.run())
        feed.tell("change 1")
        feed.hear({"m": 1})
        await idle()
        assert line.sent == []
        line.revision = 3
        feed.refresh()
        feed.tell("change 3")
        feed.hear({"n": 5})
        await idle()
        assert line.sent == ["view 3", "heard {'m': 1, 'n': 5}"]
        feed.tell("change 4")
        feed.hear({"m": 2})
        await idle()
        assert line.sent[2:] == ["change 4", "heard {'m': 2}"]
        feed.end("farewell")
        feed.tell("too late")
        await running
        assert line.sent[4:] == ["farewell"]

    play(scene)


@pytest.mark.parametrize(("texts", "size"), [(feeds._MOST_TEXTS + 1, 10), (8, feeds._MOST_BYTES // 7)])
def test_too_much_becomes_one_view_and_everything_heard(texts: int, size: int) -> None:
    async def scene(line: Line) -> None:
        feed = line.feed()
        running = asyncio.create_task(feed.run())
        feed.refresh()
        await idle()
        line.open.clear()
        feed.tell("under way")
        await idle()
        for i in range(texts):
            feed.hear({f"m{i % 2}": i})
            feed.tell("x" * size)
            assert feed.waiting_bytes <= feeds._MOST_BYTES
        assert feed.overflows >= 1
        line.revision = 99
        line.open.set()
        await idle()
        newest = {f"m{i % 2}": i for i in range(texts)}
        assert line.sent[:3] == ["view 0", "under way", "view 99"]
        assert line.sent[3] == f"heard {newest}"
        feed.end("farewell")
        await running
        assert line.sent[-1] == "farewell"

    play(scene)


def test_a_line_that_stays_full_is_given_up() -> None:
    async def scene(line: Line) -> None:
        feed = line.feed(patience=0.05)
        line.open.clear()
        feed.refresh()
        with pytest.raises(TimeoutError):
            await feed.run()

    play(scene)
