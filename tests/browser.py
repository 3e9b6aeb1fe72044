"""A real browser for tests of the page: the system's Chromium, driven by playwright (the extra `browser`)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Browser", "browser", "layout_faults", "missing"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_LOOK = Path(__file__).with_name("look.js").read_text()


def missing() -> str:
    """What keeps the browser's tests from running; "" for nothing."""
    if importlib.util.find_spec("playwright") is None:
        return "no playwright (pip install 'elastic-reshard[browser]')"
    return "" if _program() else "no Chromium (none of that name on PATH, and no $CHROMIUM)"


def _program() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """Opens pages, and keeps what they say to their consoles."""

    def __init__(self, running: Any) -> None:
        self._running = running
        self.said: list[str] = []
        self.asked: list[str] = []  # addresses

    def page(self, width: int = 1280, height: int = 900, dark: bool = False) -> Any:
        """A page of its own: nothing is remembered from one to the next."""
        context = self._running.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda said: self.said.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        return page


def layout_faults(page: Any) -> list[str]:
    """What is wrong with what is where: sideways scrolling, text outside the window, text over text."""
    found: list[str] = page.evaluate(_LOOK)
    return found


@pytest.fixture
def _running() -> Iterator[Any]:
    """One a test: a browser starts processes whenever it likes, which would be taken for left behind."""
    lacking = missing()
    if lacking:
        pytest.skip(lacking)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-proxy-server"]
        running = playwright.chromium.launch(executable_path=_program(), args=arguments)
        yield running
        running.close()


@pytest.fixture
def browser(_running: Any) -> Iterator[Browser]:
    """A browser without open pages."""
    made = Browser(_running)
    yield made
    for context in list(_running.contexts):
        context.close()
