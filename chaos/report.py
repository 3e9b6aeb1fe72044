"""The report of a soak: figures as JSON, and one page of HTML that needs nothing else."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from chaos.faults import Fault
    from chaos.observer import Finding, Observer
    from chaos.sight import Sight
    from chaos.stage import Stage

__all__ = ["Told", "made", "summary", "write"]


class Told(Protocol):
    """What a report is made of; `soak.Soak` is it. began: time.monotonic(); seconds: of faults, as asked for."""

    seed: int
    seconds: float
    plant: str
    began: float
    faults: list[Fault]
    observer: Observer
    sight: Sight
    stage: Stage
    most: Any


def made(soak: Told) -> dict[str, Any]:
    """The figures, JSON-ready. Seconds from the soak's beginning."""
    seen, faults = soak.observer, soak.faults
    carried = soak.sight.carried.values()

    def since(at: float) -> float:
        return round(at - soak.began, 3)

    def findings(found: Sequence[Finding]) -> list[dict[str, Any]]:
        return [{"at": since(f.at), "what": f.what, "who": f.who, "detail": f.detail} for f in found]

    kinds = sorted({f.kind for f in faults})
    last = max([f.whole for f in faults] + [at for at, _, _ in soak.stage.story] + [soak.began])
    return {
        "seed": soak.seed, "minutes": round(soak.seconds / 60, 2), "plant": soak.plant, "lasted": since(last),
        "faults": len(faults), "by_kind": dict(Counter(f.kind for f in faults)),
        "overlapping": sum(f.overlaps for f in faults), "during_a_transfer": sum(f.busy for f in faults),
        "recovery": {
            kind: {
                "reachable": _spread([f.recovered - f.at for f in faults if f.recovered and kind in (f.kind, "all")]),
                "everywhere": _spread([f.whole - f.at for f in faults if f.whole and kind in (f.kind, "all")]),
            }
            for kind in ["all", *kinds]
        },
        "violations": findings(seen.violations), "alarms": findings(seen.alarms),
        "versions": len(seen.committed), "steps": soak.stage.step, "samples": seen.samples,
        "bytes_network": seen.network, "bytes_carried": sum(c[0] for c in carried), "bytes_resent": sum(c[1] for c in carried),
        "calls": dict(seen.calls), "errors": dict(seen.errors), "events": dict(seen.events), "most": soak.most,
        "story": [{"at": since(at), "what": what, "detail": detail} for at, what, detail in soak.stage.story],
        "timeline": [
            {
                "number": f.number, "at": since(f.at), "kind": f.kind, "who": sorted(f.names()), "overlaps": f.overlaps,
                "busy": f.busy, "healed": since(f.healed) if f.healed else None,
                "recovered": since(f.recovered) if f.recovered else None, "whole": since(f.whole) if f.whole else None,
            }
            for f in faults
        ],
    }  # fmt: skip


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"count": len(values), "p50": round(cuts[49], 2), "p90": round(cuts[89], 2), "p99": round(cuts[98], 2),
            "max": round(max(values), 2)}  # fmt: skip


def summary(told: dict[str, Any]) -> str:
    """A few lines."""
    near, far = told["recovery"]["all"]["reachable"], told["recovery"]["all"]["everywhere"]
    lines = [
        f"{told['faults']} faults in {told['lasted']:.0f} s, {told['overlapping']} overlapping, "
        f"{told['during_a_transfer']} during a transfer; {told['versions']} versions committed; "
        f"{told['samples']} looks at served weights",
        f"recovery in s: reachable engines {near}, all engines {far}",
        f"network {told['bytes_carried'] / 1e6:.1f} MB, of that sent again {told['bytes_resent'] / 1e6:.2f} MB",
        f"{len(told['violations'])} violations, {len(told['alarms'])} false alarms",
    ]
    lines += [f"  {f['at']:.1f} s: {f['what']}: {f['who']}: {f['detail']}" for f in told["violations"] + told["alarms"]]
    return "\n".join(lines)


def write(told: dict[str, Any], folder: Path) -> None:
    """soak.json and soak.html."""
    (folder / "soak.json").write_text(json.dumps(told, indent=1))
    (folder / "soak.html").write_text(_page(told))


_STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child,td.t{text-align:left}.bad{color:#b00020;font-weight:600}.good{color:#11691c;font-weight:600}
svg{width:100%;background:#fafafa;border:1px solid #ddd}details{margin:1em 0}"""


def _page(told: dict[str, Any]) -> str:
    ok = not told["violations"] and not told["alarms"]
    verdict = (
        "nothing was violated" if ok else f"{len(told['violations'])} violations, {len(told['alarms'])} false alarms"
    )
    head = [(k, told[k]) for k in ("seed", "minutes", "plant", "faults", "overlapping", "during_a_transfer", "versions",
                                   "samples", "bytes_carried", "bytes_resent")]  # fmt: skip
    found = [(f["at"], f["what"], f["who"], f["detail"]) for f in told["violations"] + told["alarms"]]
    rows = []
    for kind, times in told["recovery"].items():
        near, far = times["reachable"], times["everywhere"]
        counts = [told["faults"] if kind == "all" else told["by_kind"][kind]]
        rows.append([kind, *counts, *(near.get(p, "") for p in _CUTS), *(far.get(p, "") for p in _CUTS)])
    story = [(f"{s['at']:.1f}", s["what"], s["detail"]) for s in told["story"]]
    return (
        f"<!doctype html><meta charset=utf-8><title>soak, seed {told['seed']}</title><style>{_STYLE}</style>"
        f"<h1>Soak</h1><p class={'good' if ok else 'bad'}>{verdict}</p>"
        + _table(("", ""), head)
        + (_table(("s", "what", "who", "detail"), found) if found else "")
        + "<h2>Recovery</h2><p>Seconds from a fault until a version that was published after it is installed in all engines "
        "that can be reached, and in all engines.</p>"
        + _table(("fault", "count", *(f"reachable {p}" for p in _CUTS), *(f"all {p}" for p in _CUTS)), rows)
        + "<h2>Time line</h2>"
        + _drawn(told)
        + "<h2>Calls, errors, events</h2>"
        + _table(("", ""), [*told["calls"].items(), *told["errors"].items(), *told["events"].items()])
        + "<h2>At most</h2>"
        + _table(("", ""), told["most"].items())
        + f"<details><summary>What happened</summary>{_table(('s', 'what', 'detail'), story)}</details>"
    )


_CUTS = ("p50", "p90", "p99", "max")


def _table(head: Sequence[str], rows: Any) -> str:
    def row(cells: Any, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    top = row(head, "th") if any(head) else ""
    return f"<table>{top}{''.join(row(cells, 'td') for cells in rows)}</table>"


def _drawn(told: dict[str, Any]) -> str:
    """A bar for each fault, from its coming to its being over, in a row of its kind; findings as red lines."""
    kinds = sorted(told["by_kind"])
    width, left, high = 1000.0, 150.0, 20
    scale = (width - left - 10) / max(told["lasted"], 1.0)
    parts = []
    for number, kind in enumerate(kinds):
        parts.append(f"<text x=4 y={number * high + 15} font-size=11>{html.escape(kind)}</text>")
    for fault in told["timeline"]:
        y = kinds.index(fault["kind"]) * high + 4
        end = fault["whole"] or told["lasted"]
        what = f"{fault['number']}: {fault['kind']} {', '.join(fault['who'])}, {end - fault['at']:.1f} s"
        x, long = left + fault["at"] * scale, max(2.0, (end - fault["at"]) * scale)
        parts.append(
            f"<rect x={x:.1f} y={y} width={long:.1f} height={high - 8} fill='{'#d97706' if fault['busy'] else '#5b7fb5'}'>"
            f"<title>{html.escape(what)}</title></rect>"
        )
    for finding in told["violations"] + told["alarms"]:
        x = left + finding["at"] * scale
        parts.append(f"<line x1={x:.1f} x2={x:.1f} y1=0 y2={len(kinds) * high} stroke='#b00020'/>")
    body = "".join(parts)
    note = "<p>Orange: while a transfer was under way.</p>"
    return (
        f"<svg viewBox='0 0 {width:.0f} {len(kinds) * high + 6}' xmlns='http://www.w3.org/2000/svg'>{body}</svg>{note}"
    )
