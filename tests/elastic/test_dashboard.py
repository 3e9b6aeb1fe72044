"""The page in a real browser beside a real job: what happens is seen as it happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.browser import Browser, _running, browser, layout_faults
from tests.elastic.stage import SETTINGS, Stage, kill
from tests.elastic.world import World

__all__ = ["_running", "browser"]

Maker = Callable[..., World]
BARS = "[...document.querySelectorAll('#transfer [role=progressbar]')]"
# Keeps what was shown, however shortly.
WATCH = """() => {
  window.seen = {};
  for (const id of ["verdict", "waits"]) {
    const of = document.getElementById(id), texts = (seen[id] = []);
    new MutationObserver(() => texts.push(of.textContent)).observe(of, { childList: true, characterData: true, subtree: true });
  }
}"""
FILLS = f"() => {BARS}.some((b) => b.ariaValueMax > 0 && b.ariaValueNow > 0)"


def opened(world: World, browser: Browser, **how: Any) -> Any:
    page = browser.page(**how)
    page.goto(f"{world.url}/#token={world.token}")
    page.wait_for_selector("#board:not([hidden])")
    return page


def has(page: Any, selector: str, text: str) -> None:
    """Wait until an element shows a text."""
    page.wait_for_function(
        "([s, t]) => [...document.querySelectorAll(s)].some((e) => e.textContent.includes(t))", arg=[selector, text]
    )


def test_a_kill_an_epoch_and_a_recovery_are_seen_as_they_happen(make_world: Maker, browser: Browser) -> None:
    stage = Stage(make_world(**SETTINGS))
    world, wide = stage.world, opened(stage.world, browser)
    narrow = opened(stage.world, browser, width=390, height=844, dark=True)
    for page in (wide, narrow):
        has(page, "#groups tr", "engine1")
        has(page, "#verdict", "Nothing is committed yet.")
    stage.refit()
    for page in (wide, narrow):
        has(page, "#verdict", "All 2 engine groups serve version 1.")
        has(page, '#refits [data-version="1"] .end', "everywhere in")

    label, hold = stage.middle()
    epoch = world.view().membership_epoch
    for page in (wide, narrow):
        has(page, "#transfer-head", "running")
        page.wait_for_function(FILLS)
        has(page, "#verdict", "Version 2 (s2) is moving.")
        has(page, '#refits [data-version="2"] .end', "moving")
        assert layout_faults(page) == []
        page.evaluate(WATCH)
    victim = stage.engines[0][0]
    kill(world.mover(victim.id))
    for page in (wide, narrow):
        has(page, '#events [data-event="mover.ended"]', f"the mover of {victim.name} was killed or ended by itself")
        has(page, '#events [data-event="transfer.breaking"]', "is broken off")
        has(page, '#events [data-event="membership.epoch"]', f"epoch {epoch + 1} of the membership begins")
        page.wait_for_function(
            "() => ['verdict', 'waits'].every((id) => seen[id].some((t) => t.includes('is broken off')))"
        )
        assert layout_faults(page) == []
    hold.release()
    stage.serves(label)
    for page in (wide, narrow):
        has(page, "#verdict", "All 2 engine groups serve version 2.")
        has(page, '#refits [data-version="2"] .end', "fault")
        has(page, '#refits [data-version="2"] .sr', "formed anew in epoch")
        has(page, '#refits [data-version="2"] .up', f"◆ {epoch + 1}")
        has(page, "#head", f"epoch{epoch + 1}")
        has(page, "#no-waits", "Nothing waits.")
        assert layout_faults(page) == []
    folder = os.environ.get("ELASTIC_RESHARD_SCREENSHOTS")
    if folder:
        for name, page in (("wide", wide), ("narrow", narrow)):
            page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
    assert browser.said == []
    assert {url.partition("/v1/")[0].rstrip("/") for url in browser.asked} <= {world.url}
    assert not any(str(world.token) in url for url in browser.asked), "the token is in no address"
