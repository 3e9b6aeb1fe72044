"""The asynchronous client against a real supervisor: the same calls, many at once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import elastic_reshard as er
from elastic_reshard.errors import LayoutError, ProtocolError, SupervisorUnreachable, Unauthorized
from elastic_reshard.supervisor.client_async import AsyncSupervisorClient
from elastic_reshard.supervisor.server import Options, Supervisor
from tests.supervisor.real import Start
from tests.supervisor.talk import Host, body, key, name, statement

Scene = Callable[[AsyncSupervisorClient], Coroutine[Any, Any, None]]


def play(supervisor: Supervisor, scene: Scene) -> None:
    async def main() -> None:
        async with AsyncSupervisorClient(supervisor.url, supervisor.token) as client:
            async with asyncio.timeout(20):
                await scene(client)

    asyncio.run(main())


def test_it_is_exported() -> None:
    assert er.AsyncSupervisorClient is AsyncSupervisorClient


def test_everything_a_supervisor_can_be_asked(start: Start) -> None:
    supervisor = start()

    async def reading(client: AsyncSupervisorClient, host: Host) -> None:
        view = await client.view()
        assert view == host.view.snapshot()
        assert await client.members() == host.view.members
        assert await client.groups() == host.view.groups
        assert set(await client.hosts()) == {"a"}
        assert await client.publications() == host.view.publications
        (shown,) = (await client.progress()).values()
        assert (shown.state, shown.weight_version, shown.cells) == ("moving", 1, 0)
        assert await client.transfers() == {}
        assert (await client.health())["instance"] == supervisor.instance
        assert await client.ready()
        assert "/v1/view" in (await client.openapi())["paths"]
        assert (await client.events(limit=1)).events[0].event == "supervisor.started"
        layout = host.view.groups["trainer"].source_layout
        assert layout is not None
        assert (await client.layout(layout))["tensors"]["w"]["shape"] == [4, 4]

    async def acting(client: AsyncSupervisorClient) -> None:
        policies = await client.policies()
        assert await client.set_policies(replace(policies, max_lag=2)) == await client.policies()
        assert (await client.change_policies(late_after=3.0)).late_after == 3.0
        assert await client.reset_policies() == policies
        (publication,) = await client.publications()
        assert (await client.abandon(publication, "why not")).reason == "why not"
        growth = await client.grow(groups=2, within=60, name="two", wait=False)
        assert growth == (await client.grows())["two"].model_copy(update={"left": growth.left})
        assert (await client.cancel_grow("two")).cancelled
        assert (await client.growing()) == (await client.grows())["two"]
        assert (await client.leave_member(name(0), 50)).leave_within == 50
        assert set(await client.leave_group("trainer", 40)) == {name(0), name(1)}
        assert not (await client.drain("a", within=60, wait=False)).done
        assert (await client.undrain("a")).drained is None
        assert (await client.shrink(["trainer"], within=0)).done

    async def scene(client: AsyncSupervisorClient) -> None:
        assert await client.put_fragment(body()) == key()

        def admitted() -> Host:
            host = Host(supervisor)
            host.admitted([statement(0, 1), statement(1, 1)])
            host.publish(1, number=2)
            host.listen(lambda: bool(host.view.publications))
            return host

        with await asyncio.to_thread(admitted) as host:
            await reading(client, host)
            await acting(client)

    play(supervisor, scene)


def test_calls_that_wait_do_not_wait_for_each_other(start: Start) -> None:
    supervisor = start()

    async def scene(client: AsyncSupervisorClient) -> None:
        began = time.monotonic()
        revision = (await client.view()).revision
        waits = [client.view(after=revision, wait=1.0) for _ in range(20)]
        found = await asyncio.gather(*waits)
        assert {view.revision for view in found} == {revision}
        assert 0.9 < time.monotonic() - began < 5

    play(supervisor, scene)


def test_refusals_are_our_errors(start: Start) -> None:
    supervisor = start()

    async def scene(client: AsyncSupervisorClient) -> None:
        with pytest.raises(ProtocolError, match="404: no host 'x'; there are none"):
            await client.drain("x")
        with pytest.raises(LayoutError, match="422: not a fragment"):
            await client.put_fragment({"tensors": 5})
        with pytest.raises(ProtocolError, match=r"422: .*say groups or members"):
            await client.grow()
        await client.change_policies(late_after=1.0, request_id="k")
        with pytest.raises(ProtocolError, match="409: 'k' was the name of another call"):
            await client.change_policies(late_after=2.0, request_id="k")
        async with AsyncSupervisorClient(supervisor.url, "wrong") as other:
            for call in (other.view, other.health, other.policies):
                with pytest.raises(Unauthorized, match=r"\$ELASTIC_RESHARD_TOKEN"):
                    await call()
            with pytest.raises(Unauthorized):
                await anext(other.follow())

    play(supervisor, scene)


def test_nobody_and_a_patient_client(tmp_path: Path) -> None:
    options = Options(runtime=tmp_path / "run", journal=tmp_path / "j")
    first = Supervisor(options)
    port = int(first.url.rpartition(":")[2])

    async def scene() -> None:
        async with AsyncSupervisorClient(first.url, first.token, patience=20) as client:
            assert (await client.health())["term"] == 1
            await asyncio.to_thread(first.close, over=False)
            waiting = asyncio.create_task(client.change_policies(late_after=4.0))
            second = await asyncio.to_thread(Supervisor, replace(options, port=port))
            try:
                assert (await waiting).late_after == 4.0
                assert (await client.health())["term"] == 2
            finally:
                await asyncio.to_thread(second.close)
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            url = f"127.0.0.1:{deaf.getsockname()[1]}"
            async with AsyncSupervisorClient(url, "some-token", timeout=0.2) as client:
                with pytest.raises(SupervisorUnreachable, match="did not answer GET /v1/view"):
                    await client.view()

    asyncio.run(scene())


def test_url_and_token_are_found(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = start()
    monkeypatch.setenv("ELASTIC_RESHARD_RUNTIME", str(tmp_path / "run"))

    async def scene() -> None:
        async with AsyncSupervisorClient.found() as client:
            assert (client.url, (await client.health())["job"]) == (supervisor.url, "job")

    asyncio.run(scene())
