"""Verification in real processes: one wrong byte in one destination is seen, and told to all."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from elastic_reshard.errors import DigestMismatch, ReshardError
from elastic_reshard.transport import Endpoint, Program, Tally
from tests.collective import worlds
from tests.collective.worlds import Case
from tests.processes import Rank, run_ranks

DOMAINS = {
    "isolated": [0, 1, 2, 3, 4, 5],
    "one domain": [0] * 6,
    "two domains": [0, 0, 1, 1, 1, 1],  # what lands in one destination is pulled by another
}
NAME = "model.layers.1.mlp.up_proj.weight"


def spoil(tensors: Mapping[str, Tensor], name: str, *, everything: bool = False) -> None:
    """Flip a bit of one element (or of all) after the bytes have arrived and before they are compared."""
    module = import_module("elastic_reshard.collective.reshard")  # the attribute of that name is the function
    original = module.run

    def spoiled(program: Program, endpoint: Endpoint, deadline: float) -> Tally:
        tally: Tally = original(program, endpoint, deadline)
        t = tensors[name]
        data = np.frombuffer(worlds.as_bytes(t), dtype=np.uint8).copy()
        data[:: 1 if everything else data.size] ^= 1
        worlds.put(t, data.reshape(*t.shape, t.element_size()))
        return tally

    module.run = spoiled  # type: ignore[attr-defined]


class Party:
    def __init__(self, me: Rank, domains: list[int]) -> None:
        self.case: Case = worlds.catalog_case("tiny", "fsdp2", "tp2xdp2")
        self.endpoint = worlds.form(me, domains)
        self.source, self.destination = (
            worlds.tensors(side, me.rank, "ordinary") for side in (self.case.source, self.case.destination)
        )
        worlds.fill(self.case, self.source, me.rank, 1)

    def call(self, verify: str) -> ReshardError | None:
        return worlds.error_of(
            lambda: worlds.call(
                self.case,
                self.endpoint,
                self.source,
                self.destination,
                verify=verify,
                staging=64 << 10,
                message=8 << 10,
            )
        )


def one_bit(me: Rank, domains: list[int]) -> tuple[str, Any, bool]:
    party = Party(me, domains)
    assert party.call("full") is None
    if me.rank == 4:
        assert party.destination is not None
        spoil(party.destination, NAME)
    unseen = party.call("none")
    assert unseen is None
    error = party.call("full")
    return type(error).__name__, getattr(error, "ranges", ()), party.endpoint.closed


@pytest.mark.parametrize("topology", DOMAINS)
def test_one_wrong_bit_is_named_and_everybody_hears_of_it(topology: str) -> None:
    results = run_ranks(one_bit, 6, DOMAINS[topology], group=False)
    assert {kind for kind, _, _ in results} == {DigestMismatch.__name__}
    assert all(closed for *_, closed in results)
    own = results[4][1]
    assert {name for name, _, _ in own} == {NAME}
    assert all(sender != 4 for *_, sender in own)
    for rank in (0, 1, 2, 3, 5):
        # Who pulled from the victim's tensor compares with what is there now; the others hear who has something wrong.
        for name, where, sender in results[rank][1]:
            assert (name, sender) == (NAME, 4) or where == f"at member {sender}"
    assert any(where == "at member 4" for *_, ranges, _ in results for _, where, _ in ranges)


def sampled(me: Rank) -> int:
    """Calls until a tensor that is wrong everywhere is caught."""
    party = Party(me, DOMAINS["isolated"])
    if me.rank == 4:
        assert party.destination is not None
        spoil(party.destination, NAME, everything=True)
    for calls in range(1, 66):
        error = party.call("sampled")
        if error is not None:
            assert isinstance(error, DigestMismatch)
            return calls
    return 66


def test_samples_go_round_all_legs() -> None:
    calls = run_ranks(sampled, 6, group=False)
    assert len(set(calls)) == 1
    assert 1 <= calls[0] <= 64
