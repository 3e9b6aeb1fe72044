"""Pure parts: configs, the way from one set of members to the next, the interface."""

from __future__ import annotations

import itertools

import pytest

from elastic_reshard.communicator import Capabilities, Choice, Way, check_configs, choose
from elastic_reshard.errors import ProtocolError
from elastic_reshard.interfaces import (
    VARIABLE,
    Address,
    Told,
    addresses,
    machine,
    refuse_loopback,
)
from elastic_reshard.interfaces import (
    choose as choose_address,
)

ALL = Capabilities(can_shrink=True, can_grow=True, abort_frees_peers=True)
NONE = Capabilities()


def test_unlike_configs_are_refused_and_every_unlike_member_is_named() -> None:
    check_configs({})
    check_configs({"a": "x", "b": "x"})
    with pytest.raises(ProtocolError) as refused:
        check_configs({"a": "max_ctas=4", "b": "max_ctas=8", "c": "max_ctas=4", "d": "max_ctas=4", "e": ""})
    said = str(refused.value)
    assert "member b has 'max_ctas=8'" in said
    assert "member e has ''" in said
    assert "member a" not in said
    with pytest.raises(ProtocolError, match="member b has 'y'"):
        check_configs({"a": "x", "b": "y"})


@pytest.mark.parametrize(
    ("current", "wanted", "lost", "capabilities", "way", "excluded", "fresh"),
    [
        ("abc", "abc", "", ALL, Way.KEEP, (), ()),
        ("abc", "ac", "", ALL, Way.SHRINK, (1,), ()),
        ("abc", "c", "", ALL, Way.SHRINK, (0, 1), ()),  # rank 0 leaves: its part is taken by the next
        ("abc", "ca", "", ALL, Way.ANEW, (), ()),  # the order changes
        ("abc", "ac", "", NONE, Way.ANEW, (), ()),
        ("ab", "abcd", "", ALL, Way.GROW, (), (2, 3)),
        ("ab", "cab", "", ALL, Way.ANEW, (), ()),  # a fresh one before the others
        ("ab", "abc", "", NONE, Way.ANEW, (), ()),
        ("abc", "abd", "", ALL, Way.ANEW, (), ()),  # one leaves and one comes
        ("abc", "xyz", "", ALL, Way.ANEW, (), ()),
        ("abc", "ab", "c", ALL, Way.ANEW, (), ()),  # a loss is never a native shrink
        ("abc", "abc", "x", ALL, Way.KEEP, (), ()),  # somebody else's loss
        ("", "ab", "", ALL, Way.ANEW, (), ()),
    ],
)
def test_one_way_is_chosen(
    current: str, wanted: str, lost: str, capabilities: Capabilities, way: Way, excluded: object, fresh: object
) -> None:
    found = choose(tuple(current), tuple(wanted), set(lost), capabilities)
    assert (found.way, found.excluded, found.fresh) == (way, excluded, fresh)
    assert found.why


def test_an_abort_is_worth_its_deadline_only_where_it_frees_peers() -> None:
    assert choose("ab", "a", {"b"}, Capabilities(abort_frees_peers=True)).aborting
    assert not choose("ab", "a", {"b"}, Capabilities(can_shrink=True)).aborting


@pytest.mark.parametrize(("wanted", "lost"), [("aa", ""), ("", ""), ("ab", "b")])
def test_wishes_that_cannot_be(wanted: str, lost: str) -> None:
    with pytest.raises(ProtocolError):
        choose("ab", tuple(wanted), set(lost), ALL)


def test_every_choice_leads_from_the_old_ranks_to_the_new_ones() -> None:
    """All small cases: what a native change makes of the old order is exactly what is wanted."""
    count = 0
    for n, m in itertools.product(range(1, 4), range(1, 5)):
        for wanted in itertools.permutations("abcxy", m):
            current = tuple("abc"[:n])
            found = choose(current, wanted, (), ALL)
            made = {
                Way.KEEP: current,
                Way.SHRINK: tuple(x for r, x in enumerate(current) if r not in found.excluded),
                Way.GROW: current + tuple(wanted[r] for r in found.fresh),
                Way.ANEW: wanted,
            }[found.way]
            assert made == wanted
            count += found.way is not Way.ANEW
    assert count > 20
    assert isinstance(found, Choice)


LO, ETH, IB = Address("lo", "127.0.0.1"), Address("eth0", "10.0.0.5"), Address("ib0", "10.1.0.5")
DOCKER, LINK = Address("docker0", "172.17.0.1"), Address("eth1", "fe80::1%eth1")


@pytest.mark.parametrize(
    ("wanted", "found", "host", "chosen"),
    [
        (None, [LO, ETH], ["127.0.1.1"], ETH),  # the host's name resolves to loopback
        (None, [LO, ETH, IB], ["10.1.0.5"], IB),
        (None, [LO, IB, ETH], [], IB),  # the kernel's order
        (None, [LO, DOCKER, ETH], [], ETH),
        (None, [LO, DOCKER], [], DOCKER),
        (None, [LO, LINK], ["127.0.1.1"], LINK),  # with its scope
        (None, [LO, LINK, ETH], ["fe80::1%eth1"], ETH),
        (None, [LO], ["127.0.1.1"], LO),
        ("ib0", [LO, ETH, IB], [], IB),
        ("lo", [LO, ETH], [], LO),
        ("10.0.0.5", [LO, IB, ETH], [], ETH),
        ("fe80::1%eth1", [LO, ETH, LINK], [], LINK),
    ],
)
def test_the_interface_is_chosen(wanted: str | None, found: list[Address], host: list[str], chosen: Address) -> None:
    assert choose_address(wanted, found, host) == chosen


def test_an_interface_that_is_not_there_is_refused_with_what_there_is() -> None:
    with pytest.raises(ProtocolError, match=rf"{VARIABLE}=eth7.*lo \(127.0.0.1\), eth0 \(10.0.0.5\)"):
        choose_address("eth7", [LO, ETH], [])
    with pytest.raises(ProtocolError, match=VARIABLE):
        choose_address(None, [], [])


def told(machine_: str, address: Address, *candidates: Address) -> Told:
    return Told.of(Told(machine_, address, (LO, *candidates), "c").to_bytes())


def test_loopback_is_refused_for_several_machines_with_variable_and_candidates() -> None:
    refuse_loopback({0: told("m", LO), 1: told("m", LO)})  # labelled hosts of one machine
    refuse_loopback({0: told("m", ETH), 1: told("n", LINK)})
    with pytest.raises(ProtocolError) as refused:
        refuse_loopback({0: told("m", ETH), 1: told("n", LO, IB, LINK), 2: told("n", Address("lo", "::1"))})
    said = str(refused.value)
    assert "member 1 would be reached by lo (127.0.0.1); it has ib0 (10.1.0.5), eth1 (fe80::1%eth1)" in said
    assert "member 2 would be reached by lo (::1); it has no other address" in said
    assert "member 0" not in said
    assert VARIABLE in said


def test_what_a_member_told_is_checked() -> None:
    with pytest.raises(ProtocolError):
        Told.of(b"{}")
    with pytest.raises(ProtocolError):
        Told.of(b"\xff")


def test_this_machine_has_a_loopback_and_a_name() -> None:
    assert any(a.loopback and a.interface == "lo" for a in addresses())
    assert machine() == machine()
