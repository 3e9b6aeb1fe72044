"""An address that stays while what is behind it changes, as a service's address does when its pod is replaced."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

__all__ = ["Relay"]


class Relay:
    """Passes connections on to a port of this machine, in a thread of its own. url: where it listens."""

    def __init__(self) -> None:
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.Task[None]] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="relay", daemon=True)
        self._thread.start()
        ready.wait()

    def to(self, port: int) -> None:
        """From now on to that port, 0: to nobody; all connections that there are end. Returns when that is done."""
        done = threading.Event()

        def turn() -> None:
            self._port = port
            for task in list(self._open):
                task.cancel()
            done.set()

        self._loop.call_soon_threadsafe(turn)
        done.wait()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        ready.set()
        self._loop.run_forever()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            back, far = await asyncio.open_connection("127.0.0.1", self._port)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pass_on(reader, far))
                group.create_task(_pass_on(back, writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            for side in (writer, far):
                if side is not None:
                    side.transport.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.to(0)

        async def end() -> None:
            self._server.close()
            await asyncio.sleep(0)
            while rest := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in rest:
                    task.cancel()
                await asyncio.gather(*rest, return_exceptions=True)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join()
        self._loop.close()


class _End(Exception):
    """One side has ended: so does the other."""


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    raise _End
