"""Messages of the supervisor as they travel: deflated when they are long, and never larger than what is allowed."""

from __future__ import annotations

import zlib

import pytest
from pydantic import ValidationError

from elastic_reshard.protocol import view
from elastic_reshard.protocol.docs import MemberDoc, MemberState
from elastic_reshard.protocol.view import Told, deflated, read_down
from elastic_reshard.supervisor.feeds import Deflated


def told(members: int) -> Told:
    docs = {
        f"m-{i}@{i:016x}": MemberDoc(
            id=f"m-{i}@{i:016x}", group="g", rank=i, roles=frozenset({"source"}), host="h", state=MemberState.LIVE
        )
        for i in range(members)
    }
    return Told(term=1, instance="i", base=0, revision=1, membership_epoch=1, members=dict(docs))


def test_a_long_message_is_deflated_and_reads_the_same() -> None:
    short, long = told(1), told(2000)
    assert deflated(short.model_dump_json()) == short.model_dump_json()
    travels = deflated(long.model_dump_json())
    assert isinstance(travels, bytes)
    assert len(travels) < len(long.model_dump_json()) / 4
    assert read_down(travels) == long
    assert read_down(short.model_dump_json()) == read_down(short.model_dump_json().encode()) == short


def test_what_can_not_be_inflated_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = zlib.compress(told(2000).model_dump_json().encode())
    for raw in (b"\x78", b"\x78garbage", whole[:-10], whole[: len(whole) // 2]):
        with pytest.raises(ValidationError):
            read_down(raw)
    monkeypatch.setattr(view, "_LARGEST", 1000)
    with pytest.raises(ValidationError):
        read_down(whole)


def test_a_text_is_deflated_once() -> None:
    texts = [told(2000).model_dump_json()]
    made = Deflated(lambda: texts[-1])
    first = made()
    assert made() is first
    texts.append(told(2001).model_dump_json())
    assert read_down(made()) == told(2001)
