"""Steps of the state machine as the shell sees them: what is noticed, counted, pictured and said of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.events import Effects, Event, Happened
from elastic_reshard.supervisor.live import Teller
from elastic_reshard.supervisor.metrics import Metrics
from elastic_reshard.supervisor.noticing import noticed
from elastic_reshard.supervisor.picture import Picture, picture
from elastic_reshard.supervisor.state import Covers, Job

__all__ = ["Watched"]


class Watched:
    """Watches every `core.step` of a test from now on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.metrics = Metrics(lambda: (self.job, dict.fromkeys(self.job.hosts, 0), self.now))
        self.job, self.now = core.begin("job", 1, "i", 0.0), 0.0
        self.happened: list[Happened] = []
        self.steps = 0
        self._real = core.step
        self._teller, self.told = Teller(), dict[str, Any]()
        patch.setattr(core, "step", self._step)

    def _step(self, job: Job, events: Sequence[Event], now: float, covers: Covers) -> tuple[Job, Effects]:
        after, effects = self._real(job, events, now, covers)
        found = tuple(noticed(events, effects.happened, job, after))
        self.metrics.stepped(events, found, job, after, now)
        self.happened += found
        self.job, self.now = after, now
        self.steps += 1
        self._merge(self._teller.news(self.see()))
        return after, effects

    def see(self) -> Picture:
        """The picture as it is, with every host connected."""
        return picture(self.job, self.job.hosts.keys(), self.now, -1.0)

    def _merge(self, news: dict[str, Any]) -> None:
        """As a watcher puts together what it is told."""
        if news.pop("whole", False):
            self.told = news
            return
        for key, value in news.items():
            if key in ("job", "transfer", "waits"):
                self.told[key] = value
                continue
            self.told[key] = {k: v for k, v in (self.told[key] | value).items() if v is not None}

    def value(self, name: str, **labels: str) -> float | None:
        """What a scrape says of a sample; None if it is not there."""
        return self.samples().get((f"elastic_reshard_{name}", tuple(sorted(labels.items()))))

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All that a scrape says."""
        text = self.metrics.text("")[0].decode()
        return {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }
