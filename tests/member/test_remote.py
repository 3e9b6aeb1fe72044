"""What a member asks the supervisor for directly: nobody waits for another's deadline."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Self

import pytest

from elastic_reshard.layout import Mesh, ModelLayout, Shard, TensorLayout
from elastic_reshard.layout.side import Side
from elastic_reshard.member.remote import Remote

KEY = "ab"
SIDE = Side(ModelLayout({"a": TensorLayout((4,), "float32", Mesh.arange((2,), ("fsdp",)), (Shard(0),))}))


class Client:
    """A supervisor's HTTP side whose first answer does not come before it may."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def layout(self, key: str) -> Any:
        if not self.asked.is_set():
            self.asked.set()
            assert self.may.wait(20.0)
        return json.loads(SIDE.body)


def test_a_layout_is_not_waited_for_behind_another_threads_call(monkeypatch: pytest.MonkeyPatch) -> None:
    remote, client = Remote("127.0.0.1:1", "token", None), Client()
    monkeypatch.setattr(remote, "_client", lambda deadline: client)
    found: list[Any] = []
    slow = threading.Thread(target=lambda: found.append(remote.layout(KEY, time.monotonic() + 20.0)))
    slow.start()
    assert client.asked.wait(5.0)
    quick = threading.Thread(target=lambda: found.append(remote.layout(KEY, time.monotonic() + 2.0)))
    quick.start()
    quick.join(5.0)
    try:
        assert len(found) == 1, "it had its answer while the other waited for its own"
    finally:
        client.may.set()
        slow.join()
        quick.join()
    assert found[0][0] is found[1][0], "one layout, whoever asked"
