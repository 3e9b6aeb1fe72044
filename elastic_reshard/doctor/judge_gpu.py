"""The doctor's judgement on GPUs and NCCL. Pure. What is said of versions was measured by this project (FACTS)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from elastic_reshard.doctor.facts import Facts, Finding, Gpus

__all__ = ["KNOWN", "judge_gpus"]

_OLDEST_DRIVER: Final = 525  # the first of CUDA 12
# (package, version) -> (what is known, what to do). Only what was seen.
KNOWN: Final[dict[tuple[str, str], tuple[str, str]]] = {
    ("nccl-extensions", "0.1.0"): (
        "while an M2N reshard is in flight and a peer is dead or frozen, abort, shrink and revoke do not return in 25 s on any "
        "survivor (nccl-extensions issue 23)",
        "never call it from a process that must live: movers do, and are ended by SIGKILL; so leave it to them",
    ),
    ("nccl4py", "0.3.1.post1"): (
        "abort deregisters windows first, and may block before it sets the abort flag",
        "never call it from a process that must live: movers do, and are ended by SIGKILL",
    ),
}
_MEASURED_NCCL: Final = "2.30.7"


def judge_gpus(facts: Facts) -> Iterator[Finding]:
    """Findings on GPUs, in order; one line if there are none."""
    gpus = facts.gpus
    if gpus.absent:
        yield Finding("GPUs", "ok", f"none known: {gpus.absent}; weights lie in host memory")
        if gpus.mps:
            yield _mps(gpus)
        return
    if not gpus.found:
        yield Finding("GPUs", "warn", f"driver {gpus.driver}, but no GPU is visible", "give the container its GPUs")
        return
    yield from _found(gpus)
    if gpus.mps:
        yield _mps(gpus)
    else:
        yield Finding("CUDA MPS", "ok", "does not run")
    yield from _near(gpus)
    yield from _fabric(gpus)
    yield from _nccl(facts)


def _found(gpus: Gpus) -> Iterator[Finding]:
    names = Counter(gpu.name for gpu in gpus.found)
    said = ", ".join(f"{count} x {name}" for name, count in names.items())
    uuids = ", ".join(gpu.uuid for gpu in gpus.found)
    yield Finding("GPUs", "ok", f"{said}: {uuids}")
    if any(gpu.mig for gpu in gpus.found):
        yield Finding(
            "MIG", "warn", "is on for " + ", ".join(gpu.uuid for gpu in gpus.found if gpu.mig),
            "GPUs of one domain must map each other's memory, which slices of a GPU do not: turn MIG off",
        )  # fmt: skip
    major = gpus.driver.partition(".")[0]
    said = f"driver {gpus.driver}, CUDA up to {gpus.cuda}"
    if major.isdigit() and int(major) < _OLDEST_DRIVER:
        yield Finding("GPU driver", "bad", said, f"install {_OLDEST_DRIVER} or newer; measured with 580")
    else:
        yield Finding("GPU driver", "ok", said)


def _mps(gpus: Gpus) -> Finding:
    return Finding(
        "CUDA MPS", "bad", f"runs (process {', '.join(map(str, gpus.mps))})",
        "end it (echo quit | nvidia-cuda-mps-control): under MPS a mover that is killed takes members with it (measured), so "
        "nothing on GPUs starts",
    )  # fmt: skip


def _near(gpus: Gpus) -> Iterator[Finding]:
    if len(gpus.found) < 2:
        return
    if gpus.apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in gpus.apart[:16])
        yield Finding(
            "peer memory", "warn", f"GPUs {pairs} cannot read each other's memory",
            "weights go between them by movers, as between hosts: GPUs that map each other's memory are a domain of their own. "
            "If they should, look at nvidia-smi topo -p2p r",
        )  # fmt: skip
    else:
        yield Finding("peer memory", "ok", f"all {len(gpus.found)} GPUs read each other's memory")


def _fabric(gpus: Gpus) -> Iterator[Finding]:
    states = {gpu.fabric for gpu in gpus.found} - {""}
    if not states:
        yield Finding("NVLink fabric", "ok", "none that spans machines")
        return
    if states != {"completed"}:
        yield Finding(
            "NVLink fabric", "warn", f"state {', '.join(sorted(states))}",
            "look at the fabric manager and nvidia-smi -q: until it is completed this machine is a domain of its own",
        )  # fmt: skip
        return
    cliques = {(gpu.cluster, gpu.clique) for gpu in gpus.found}
    said = ", ".join(f"cluster {cluster}, clique {clique}" for cluster, clique in sorted(cliques))
    if len(cliques) > 1:
        yield Finding(
            "NVLink fabric", "warn", said, "GPUs of one machine are in several cliques: see the fabric manager"
        )
    else:
        yield Finding(
            "NVLink fabric", "ok", f"{said}; shown only: a domain is one host, as arenas are no fabric handles"
        )


def _nccl(facts: Facts) -> Iterator[Finding]:
    if facts.nccl:
        same = "" if facts.nccl == _MEASURED_NCCL else f"; this project measured {_MEASURED_NCCL}"
        yield Finding("NCCL", "ok", f"{facts.nccl}{same}")
    else:
        yield Finding("NCCL", "warn", "no NCCL library was found", "pip install nccl4py nvidia-nccl-cu13")
    for package in sorted({name for name, _ in KNOWN}):
        version = facts.packages.get(package, "")
        known = KNOWN.get((package, version))
        if known is not None:
            yield Finding(package, "warn", f"{version}: {known[0]}", known[1])
        elif version:
            yield Finding(package, "ok", f"{version}; nothing bad is known of it here, nor was it measured")
