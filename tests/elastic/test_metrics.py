"""What a scrape says of a real job: bytes by link, cells and installs are those that were moved."""

from __future__ import annotations

from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.elastic.stage import CELL, SETTINGS, SIZE, Stage
from tests.elastic.world import World, until


def scrape(world: World) -> dict[str, float]:
    """Samples by name and labels, as they are written."""
    answer = httpx.get(
        f"{world.url}/metrics", headers={"Authorization": f"Bearer {world.token}"}, trust_env=False, timeout=10
    )
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[sample.name.removeprefix("elastic_reshard_") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_a_scrape_of_a_real_job(make_world: Callable[..., World]) -> None:
    stage = Stage(make_world(**SETTINGS))
    world = stage.world
    stage.refit()
    found = scrape(world)
    links = {name: n for name, n in found.items() if name.startswith("link_bytes_total")}
    for host in ("b", "c"):  # perhaps from each other, if one was ready before the other
        assert sum(n for name, n in links.items() if f"destination={host}," in name) == SIZE
    assert any("source=a" in name for name in links)
    assert found["network_bytes_total"] == stage.network("s1") == 2 * SIZE
    assert found["resent_bytes_total"] == 0
    assert found["published_bytes_total"] == SIZE
    assert found["installed_bytes_total"] == 2 * SIZE
    assert found["installs_total{verdict=current}"] == found["install_seconds_count"] == 2
    assert found["publish_stall_seconds_count"] == found["commits_total"] == 1
    assert found["transfers_total{outcome=whole}"] in (1, 2)
    assert found["transfer_seconds_sum{outcome=whole}"] > 0
    assert found["commit_seconds_count"] == 1
    assert found["members{state=live}"] == 6
    assert found["groups{state=current}"] == 2
    assert found["slots_held{host=a,kind=source}"] == 2
    assert found["slots_held{host=b,kind=landing}"] == 2
    assert found["arena_bytes{host=b,kind=landing}"] >= SIZE
    assert found["host_connected{host=c}"] == 1
    _, hold = stage.middle()
    until(lambda: scrape(world).get("transfer_landed_cells{group=engine0}", 0) > 0 or None, "cells are seen to land")
    found = scrape(world)
    assert found["transfer_in_hand{state=running}"] == 1
    assert found["transfer_cells{group=engine0}"] == SIZE / CELL
    assert found["transfer_landed_cells{group=engine0}"] < SIZE / CELL
    hold.release()
    stage.serves("s2")
