"""The thread that keeps groups, beside a supervisor that has ended: no Ray cluster is needed to see that it goes on."""

from __future__ import annotations

from typing import NoReturn

import pytest

from elastic_reshard.errors import Fenced, ProtocolError, ReshardError, SupervisorUnreachable, Unauthorized
from elastic_reshard.on_ray import Groups, groups


@pytest.mark.parametrize("why", [Fenced, ProtocolError, SupervisorUnreachable, Unauthorized])
def test_workers_outlive_whatever_ended_the_supervisor(
    monkeypatch: pytest.MonkeyPatch, why: type[ReshardError]
) -> None:
    asked = []

    def ended(job: str, timeout: float, patience: float) -> NoReturn:
        asked.append(job)
        raise why("its disk is full")

    monkeypatch.setattr(groups, "client_of", ended)
    # Not a node, actor or supervisor is there: only what is made of an answer that is an error.
    monkeypatch.setattr("elastic_reshard.on_ray.cluster.nodes", dict)
    monkeypatch.setattr("elastic_reshard.on_ray.cluster.told", lambda key: {})
    with Groups("job", []) as made:
        with made._changed:
            assert made._changed.wait_for(lambda: bool(asked) or made._error is not None, timeout=10)
        made._thread.join(0.5)
        assert made._thread.is_alive()
        assert made.status() == {}
