"""The page and its WebSocket: who gets in, what they are told, and how it looks when something is wrong. In a real browser
where one is needed."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from elastic_reshard.protocol.messages import Landing, MoverSaid
from elastic_reshard.supervisor import calling
from elastic_reshard.supervisor import live as watching
from elastic_reshard.supervisor.page import page as the_page
from elastic_reshard.supervisor.server import Supervisor
from tests.browser import Browser, _running, browser, layout_faults
from tests.supervisor.real import pair
from tests.supervisor.talk import Host, key, name, statement, until

__all__ = ["_running", "browser"]

Start = Callable[..., Supervisor]


def live(supervisor: Supervisor, token: str | None = None, **more: Any) -> ClientConnection:
    headers = {"Authorization": f"Bearer {token or supervisor.token}"} if "subprotocols" not in more else {}
    return connect(supervisor.url.replace("http", "ws") + "/v1/live", additional_headers=headers, proxy=None, **more)


def coded(token: str) -> str:
    return "bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


class Watcher:
    """A connection, and all that it was told."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._stack = ExitStack()
        self._socket = self._stack.enter_context(live(supervisor))
        self.seen: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    def until(self, enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Put together what is told until it is enough."""
        while not self.seen or not enough(self.seen):
            news = json.loads(self._socket.recv(timeout=10))
            self.events += news.pop("events", [])
            whole = news.pop("whole", False)
            for kind, value in news.items():
                keyed = kind in ("hosts", "members", "groups", "publications") and not whole
                found = self.seen[kind] | value if keyed else value
                self.seen[kind] = {k: v for k, v in found.items() if v is not None} if keyed else found
        return self.seen

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# -- without a browser


def test_the_page_is_whole_and_closed() -> None:
    body, headers = the_page()
    text = body.decode()
    assert "innerHTML" not in text
    assert "eval(" not in text
    assert not re.findall(r"\son\w+=|style=\"|javascript:", text), "only what the policy allows"
    assert not re.findall(r"(?:src|href)=\"(?!data:,)", text), "nothing is fetched"
    assert "http" not in re.sub(r"location\.origin\.replace\(/\^http/", "", text)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert text.count("<script>") == policy.split("style-src")[0].count("sha256-") == 1
    assert "frame-ancestors 'none'" in policy


def test_the_page_is_open_and_what_it_shows_is_not(start: Start) -> None:
    made = start()
    answer = httpx.get(made.url + "/", trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == the_page()[1]["Content-Security-Policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert made.token not in answer.text
    assert httpx.get(made.url + "/anything", trust_env=False).status_code == 401
    for offered in (
        [],
        ["elastic-reshard"],
        ["elastic-reshard", "bearer.%%%"],
        ["elastic-reshard", coded("wrong-token")],
    ):
        with (
            pytest.raises(InvalidStatus) as refused,
            live(made, subprotocols=offered or None) if offered else live(made, "no"),
        ):
            pass
        assert refused.value.response.status_code == 401
    with live(made, subprotocols=["elastic-reshard", coded(made.token)]) as socket:
        assert socket.subprotocol == "elastic-reshard", "a browser gives up otherwise"
        assert json.loads(socket.recv(timeout=10))["whole"]
    with live(made) as socket:
        assert socket.subprotocol is None


def test_a_token_of_any_signs_comes_as_a_subprotocol(start: Start) -> None:
    made = start(token='a"token,with;signs/and~more?')
    with live(made, subprotocols=["elastic-reshard", coded(made.token)]) as socket:
        assert json.loads(socket.recv(timeout=10))["job"]["name"] == "job"


def test_watchers_are_told_what_changes_and_why_something_waits(start: Start) -> None:
    made = start()
    with Watcher(made) as first:
        assert first.until(lambda seen: True)["members"] == {}
        more: dict[str, Any] = {"roles": {"destination"}, "source": None, "destination": key(), "host": "b"}
        landing = Landing(arena="cd" * 16, cells=4, cell=1 << 20)
        with pair(made) as host, Host(made, "b") as other, host.beating(), other.beating():
            other.state(statement(0, 1, group="engine", size=2, landing=landing, **more))
            seen = first.until(lambda s: any("rank 1" in w["why"] for w in s["waits"]))
            assert "1 of its 2 ranks is missing" in next(w["why"] for w in seen["waits"] if w["about"] == "engine")
            other.admitted([statement(0, 2, group="engine", size=2, landing=landing, **more),
                            statement(1, 1, group="engine", size=2, landing=landing, **more)])  # fmt: skip
            host.listen(lambda: "engine" in host.view.groups)
            host.publish(1, number=2)
            host.listen(lambda: bool(host.view.transfers))
            (transfer,) = host.view.transfers.values()
            member = transfer.landings[0].member
            other.say(MoverSaid(member=member, mover="ab", transfer=transfer.id, state="running", cells=3, to_land=4,
                                waits=(name(0), 2)))  # fmt: skip
        with Watcher(made) as second:
            seen = second.until(lambda s: s["transfer"] is not None and s["transfer"]["state"] == "forming")
            assert seen["transfer"]["cells"]["engine"][0] == 3
            about = {w["about"]: w for w in seen["waits"]}
            assert "commits when engine has all of it" in about["version 1 (step)"]["why"]
            assert about["version 1 (step)"]["until"] > seen["at"]
            assert "start and plan" in about[f"transfer of epoch {transfer.epoch}"]["why"]
            assert seen["groups"]["engine"]["state"] == "landing"
            said = [e["words"][1] for e in second.events if e["words"] is not None]
            assert "version 1 (step) of trainer begins to move" in said
            assert [e["number"] for e in second.events] == sorted({e["number"] for e in second.events})


def test_watchers_are_so_many_at_most(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOST_WATCHERS", 1)
    supervisor = start()
    with live(supervisor) as one:
        one.recv(timeout=10)
        with live(supervisor) as other, pytest.raises(ConnectionClosed, match="ask GET /v1/view"):
            other.recv(timeout=10)

    def again() -> bool:
        with live(supervisor) as third:
            try:
                return bool(third.recv(timeout=10))
            except ConnectionClosed:
                return False

    until(again, "who comes after one has gone is served")


def test_a_watcher_ends_with_the_supervisor(start: Start) -> None:
    made = start()
    with live(made) as socket:
        socket.recv(timeout=10)
        made.close()
        with pytest.raises(ConnectionClosed):
            _ = [socket.recv(timeout=10) for _ in range(1000)]


def test_a_watcher_stays_longer_than_a_call_may_take(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_SEND_WITHIN", 0.3)
    made = start()
    with live(made) as socket:
        for _ in range(3):
            socket.recv(timeout=5)  # one a second


def test_quiet_watchers_hear_that_the_supervisor_is_there(start: Start) -> None:
    made = start()
    with live(made) as socket:
        assert json.loads(socket.recv(timeout=10))["whole"]
        assert set(json.loads(socket.recv(timeout=5))) == {"at"}


# -- in a browser


def test_a_wrong_token_is_said_in_words(start: Start, browser: Browser) -> None:
    made = start()
    for width in (1280, 390):
        page = browser.page(width=width)
        page.goto(made.url)
        page.wait_for_selector("#gate:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "token", "one may type at once"
        assert page.locator("#wrong").text_content() == ""
        page.keyboard.type("not the token")
        page.keyboard.press("Enter")
        until(lambda page=page: "has at least 8" in page.locator("#wrong").text_content(), "it could be no token")
        page.keyboard.type("some-other-token")
        page.keyboard.press("Enter")
        until(
            lambda page=page: "not the token of the job" in page.locator("#wrong").text_content(), "it is another one's"
        )
        assert layout_faults(page) == []
        page.fill("#token", made.token)
        page.click("#form button")
        page.wait_for_selector("#board:not([hidden])")
        until(lambda page=page: page.locator("#verdict").text_content() == "Nobody has joined yet.", "it is shown")
        assert layout_faults(page) == []
        page.reload()
        page.wait_for_selector("#board:not([hidden])")  # the tab remembers it
        page.click("#forget")
        page.wait_for_selector("#gate:not([hidden])")
        assert page.evaluate("sessionStorage.length + localStorage.length + document.cookie.length") == 0
    assert browser.said == [], "nothing in the console"
    assert not any(made.token in url or "some-other" in url for url in browser.asked)


def test_the_tokens_fragment_is_taken_away(start: Start, browser: Browser) -> None:
    made = start(token='signs+and/"more"=')
    page = browser.page()
    page.goto(made.url + "/#token=signs%2Band%2F%22more%22%3D")
    page.wait_for_selector("#board:not([hidden])")
    until(lambda: page.locator("#link").text_content() == "live", "it is connected")
    assert page.url == made.url + "/"
    assert browser.said == []


def test_names_are_text_and_the_page_comes_back_after_a_restart(start: Start, browser: Browser, tmp_path: Any) -> None:
    made = start(journal=tmp_path / "journal")
    page = browser.page(width=390)
    page.goto(f"{made.url}/#token={made.token}")
    label = "<img src=x onerror=alert(1)>" + "long" * 40
    with pair(made) as host, host.beating():
        host.publish(1, number=2, label=label)
        until(lambda: label in page.locator("#refits").text_content(), "the version is shown")
        assert page.locator("#refits img").count() == 0
        assert layout_faults(page) == []
    made.close(over=False)
    until(lambda: "connection" in page.locator("#link").text_content(), "it is seen that nobody is there")
    assert "is lost" in page.locator("#verdict").text_content()
    assert label in page.locator("#refits").text_content(), "what was known stays"
    again = start(journal=tmp_path / "journal", port=int(made.url.rpartition(":")[2]), token=made.token)
    until(lambda: "term2" in page.locator("#head").text_content(), "it is connected to the next one")
    assert again.term == 2
    refused = [said for said in browser.said if "ERR_CONNECTION_REFUSED" not in said]
    assert refused == [], "but for what the browser itself says of nobody"


def test_the_page_can_be_used_by_keys_and_is_read_aloud(start: Start, browser: Browser) -> None:
    made = start()
    page = browser.page()
    page.goto(f"{made.url}/#token={made.token}")
    with pair(made) as host, host.beating():
        until(lambda: "trainer" in page.locator("#groups").text_content(), "the group is shown")
        found = []
        for _ in range(3):
            page.keyboard.press("Tab")
            found.append(page.evaluate("document.activeElement.id"))
        assert found == ["forget", "only", "events"]
        page.focus("#only")
        page.keyboard.press("Space")
        until(lambda: "Nothing unusual." in page.locator("#events").text_content(), "the filter works")
        headings = page.get_by_role("heading").all_text_contents()
        assert headings[0] == "job"
        assert [h.split("  ")[0] for h in headings[1:3]] == ["Why something waits", "Transfer in hand "]
        assert page.get_by_role("table", name="Groups").count() == 1
        assert page.get_by_role("status").count() == 1


def test_contrast_is_enough_in_both_schemes(start: Start, browser: Browser) -> None:
    """WCAG AA: 4.5 to 1 for every colour of text on what it lies on."""
    made = start()
    for dark in (False, True):
        page = browser.page(dark=dark)
        page.goto(made.url)
        colours = page.evaluate("""() => {
          const of = getComputedStyle(document.documentElement), found = {};
          for (const n of ["ground","card","track","ink","soft","calm","good","late","bad","calm-wash","good-wash","late-wash","bad-wash"])
            found[n] = of.getPropertyValue("--" + n).trim();
          return found;
        }""")  # noqa: E501
        pairs = [
            (ink, ground) for ink in ("ink", "soft", "calm", "good", "late", "bad") for ground in ("ground", "card")
        ]
        pairs += [(tone, f"{tone}-wash") for tone in ("calm", "good", "late", "bad")] + [("soft", "track")]
        for ink, ground in pairs:
            ratio = contrast(colours[ink], colours[ground])
            assert ratio >= 4.5, f"{ink} on {ground}{' (dark)' if dark else ''}: {ratio:.2f}"


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
