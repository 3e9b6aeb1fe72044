"""A bundle for whoever looks into a failure: what can be had of a job on this machine, in one .tar.gz.

In it: what the supervisor answers (view, hosts, events, policies, progress of what lands, epochs, metrics), its journal's
documents, the watchdogs' records and logs, stacks of watchdogs, movers and the supervisor, versions, the doctor's report. Never
in it: weights (no arena is opened), the job's token (it is blotted out wherever it should turn up), environments. What could
not be had is said in `missing.json`; each part and the whole are bounded in size and time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from elastic_reshard.doctor import journaled, stacks
from elastic_reshard.doctor.gather import gather
from elastic_reshard.doctor.judge import judge
from elastic_reshard.errors import ProtocolError, ReshardError
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.watchdog.drain import Guarded, guarded
from elastic_reshard.watchdog.runtime import Paths, read_record, runtime_folder

__all__ = ["Bundle", "Wanted", "collect"]

_LARGEST: Final = 16 << 20  # bytes of one file; of a longer one the end is kept
_WHOLE: Final = 96 << 20  # bytes of all
_LOG: Final = 512 << 10  # bytes of a log's end
_CALL: Final = 3.0  # seconds of one call
_ASKED: Final = ("health", "view", "hosts", "policies", "transfers", "grow", "progress")
_EPOCHS: Final = ("transfer.", "membership.epoch", "mover.", "publication.", "supervisor.", "host.", "watchdog.")
_LAST: Final = 1000  # of these events
_PAGES: Final = 12  # of 1,000 events
_BLOT: Final = b"[the job's token]"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of which job. url, token: of its supervisor, "" if they are not known. journal: its file, None if that is not here.
    runtime: the runtime folder, None for the usual one. within: seconds that all may take."""

    job: str
    url: str = ""
    token: str = field(default="", repr=False)
    journal: Path | None = None
    runtime: Path | None = None
    within: float = 20.0


class Bundle:
    """Files by name, and what is missing and why. Nothing is on disk until `write`."""

    def __init__(self, wanted: Wanted) -> None:
        self.files: dict[str, bytes] = {}
        self.missing: dict[str, str] = {}
        self._wanted = wanted
        self._until = time.monotonic() + wanted.within
        self._size = 0

    def add(self, name: str, said: bytes | str | Any) -> None:
        """One file: bytes, text, or what becomes JSON. Without the token."""
        raw = said if isinstance(said, bytes) else said.encode() if isinstance(said, str) else _json(said)
        for form in _forms(self._wanted.token):
            raw = raw.replace(form, _BLOT)
        if len(raw) > _LARGEST:
            raw = b"[the beginning is left out]\n" + raw[-_LARGEST:]
        if self._size + len(raw) > _WHOLE:
            self.missing[name] = f"the bundle would be larger than {_WHOLE >> 20} MiB"
            return
        self._size += len(raw)
        self.files[name] = raw

    def lacks(self, name: str, why: str) -> None:
        """This could not be had."""
        self.missing[name] = why.replace(self._wanted.token, "[the job's token]") if self._wanted.token else why

    def attempt(self, name: str, make: Callable[[], Any]) -> Any:
        """Add what `make` returns; its value, or None if it failed or time is over."""
        if time.monotonic() >= self._until:
            self.lacks(name, f"the {self._wanted.within:g} s for the bundle were over")
            return None
        try:
            made = make()
        except (OSError, ReshardError, httpx.HTTPError, ValueError) as error:
            self.lacks(name, f"{type(error).__name__}: {error}")
            return None
        self.add(name, made)
        return made

    def write(self, path: Path) -> None:
        """Write it, for this user only. Raises ProtocolError if the file cannot be made."""
        self.files["missing.json"] = _json(self.missing)
        folder = path.name.removesuffix(".tar.gz")
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.fchmod(handle, 0o600)  # of a file that was there, too
            with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
                for name, content in sorted(self.files.items()):
                    entry = tarfile.TarInfo(f"{folder}/{name}")
                    # The wall clock, for whoever unpacks it; nothing is decided by it.
                    entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
                    archive.addfile(entry, io.BytesIO(content))
        except OSError as error:
            raise ProtocolError(
                f"the bundle {path} cannot be written: {error.strerror}; name another with -o"
            ) from error


def _forms(token: str) -> set[bytes]:
    """A token as it may stand in a text, and in JSON."""
    return {token.encode(), json.dumps(token)[1:-1].encode()} if token else set()


def _json(said: Any) -> bytes:
    return json.dumps(said, indent=1, default=str).encode()


def collect(wanted: Wanted) -> Bundle:
    """Collect what can be had now. Blocks for `wanted.within` seconds at most, and the time of one call more (3 s). Stacks are
    taken by a signal that its receivers only answer; nobody is stopped."""
    bundle = Bundle(wanted)
    _ask_supervisor(bundle, wanted)
    watchdogs = guarded(wanted.job, wanted.runtime)
    _ask_processes(bundle, wanted, watchdogs)
    _read_files(bundle, wanted, watchdogs)
    bundle.attempt("doctor.json", lambda: _doctor(wanted))
    bundle.add("about.json", {
        "job": wanted.job, "url": wanted.url, "protocol": PROTOCOL, "hosts_here": [one.host for one in watchdogs],
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "for_display_only": "made",
    })  # fmt: skip
    return bundle


def _doctor(wanted: Wanted) -> dict[str, Any]:
    facts = gather(wanted.runtime)
    return {"findings": [asdict(finding) for finding in judge(facts)], "facts": facts.to_data()}


# -- the supervisor


def _ask_supervisor(bundle: Bundle, wanted: Wanted) -> None:
    if not wanted.url:
        bundle.lacks("supervisor", "no supervisor of the job is known here; name it with --url")
        return
    headers = {"Authorization": f"Bearer {wanted.token}"}
    tls = wanted.url.startswith("https:")
    with httpx.Client(base_url=wanted.url, headers=headers, timeout=_CALL, trust_env=False, verify=tls) as client:
        if bundle.attempt("supervisor/health.json", lambda: _get(client, "/v1/health")) is None:
            bundle.lacks("supervisor", f"the supervisor at {wanted.url} does not answer; see supervisor/health.json")
            return
        for name in _ASKED[1:]:
            bundle.attempt(f"supervisor/{name}.json", lambda path=f"/v1/{name}": _get(client, path))  # type: ignore[misc]
        bundle.attempt("supervisor/metrics.txt", lambda: _get(client, "/metrics"))
        raw = bundle.attempt("supervisor/events.json", lambda: b"\n".join(_events(client)))
        bundle.attempt("supervisor/epochs.txt", lambda: _epochs(raw or b""))


def _get(client: httpx.Client, path: str) -> bytes:
    answer = client.get(path)
    if answer.is_error:
        raise ProtocolError(f"{path}: {answer.status_code}: {answer.text[:300]}")
    return answer.content


def _events(client: httpx.Client) -> Iterator[bytes]:
    """All that the supervisor remembers, a page a line."""
    after: int | str = 0
    for _ in range(_PAGES):
        raw = _get(client, f"/v1/events?after={after}&limit=1000")
        yield raw
        page = json.loads(raw)
        if len(page["events"]) < 1000:
            return
        after = page["next"]


def _epochs(pages: bytes) -> str:
    """How transfers and epochs went, a line each; oldest first. What has landed now is in progress.json."""
    lines = []
    for page in filter(None, pages.split(b"\n")):
        for event in json.loads(page)["events"]:
            if event["event"].startswith(_EPOCHS):
                said = ", ".join(f"{key} {value}" for key, value in event["fields"].items() if value not in ("", None))
                lines.append(f"{event['time']} {event['event']}: {said[:1000]}")
    return "\n".join(lines[-_LAST:]) + "\n"


# -- this machine


def _ask_processes(bundle: Bundle, wanted: Wanted, watchdogs: list[Guarded]) -> None:
    """Stacks go to the logs, which are read afterwards."""
    pids: dict[str, int] = {}
    ours: dict[str, int] = {}
    for one in watchdogs:
        movers = {f"mover {m} of {hand.member}": hand for m, hand in one.record.movers.items()}
        pids |= {f"watchdog of {one.host}": one.record.pid} | {who: hand.pid for who, hand in movers.items()}
        ours |= {f"watchdog of {one.host}": one.record.start} | {who: hand.start for who, hand in movers.items()}
        pids |= {f"member {m}": resident.pid for m, resident in one.record.members.items() if resident.ended is None}
    for number, pid in enumerate(stacks.supervisors(wanted.job)):
        pids[f"supervisor {number}"], ours[f"supervisor {number}"] = pid, 0
    seen = bundle.attempt("processes.json", lambda: stacks.look(pids, ours))
    for who, found in (seen or {}).items():
        if found.get("log") and who.startswith("supervisor"):
            log = Path(found["log"])
            bundle.attempt(f"logs/{who.replace(' ', '-')}.log", lambda log=log: tail(log))  # type: ignore[misc]


def _read_files(bundle: Bundle, wanted: Wanted, watchdogs: list[Guarded]) -> None:
    folders = {one.paths.folder for one in watchdogs}
    nursery = ""  # its name, a digest where names had to be shortened
    with contextlib.suppress(ProtocolError):
        folders.add(Paths.of(wanted.job, "-", wanted.runtime).folder)
        nursery = Paths.of_nursery(wanted.job, wanted.runtime).name
        folders.add(Paths.of_nursery(wanted.job, wanted.runtime).folder)
    base = runtime_folder(wanted.runtime).absolute()
    for folder in sorted(folders):
        # In the base folder are other jobs' files too, when names had to be shortened.
        names = {one.paths.name for one in watchdogs if one.paths.folder == folder}
        for path in sorted(folder.glob("*.log")):
            if folder != base or path.stem in {*names, nursery}:
                told = path.name if path.stem != nursery or "nursery" in nursery else f"nursery-{path.name}"
                bundle.attempt(f"logs/{told}", lambda path=path: tail(path))  # type: ignore[misc]
    for one in watchdogs:
        bundle.attempt(f"hosts/{one.host}.json", lambda one=one: _record(one))  # type: ignore[misc]
    journal = wanted.journal or base / wanted.job / "journal.sqlite"
    bundle.attempt("journal.json", lambda: journaled.read(journal))


def _record(one: Guarded) -> dict[str, Any]:
    record = read_record(one.paths.record)
    return asdict(record if record is not None else one.record)


def tail(path: Path, nbytes: int = _LOG) -> bytes:
    """The end of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - nbytes))
        return file.read(nbytes)
