"""A real Ray cluster of several raylets on this machine, each at a loopback address of its own, kept for a module's tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.watchdog.runtime import running
from tests.leaks import Traces, left_behind, traces

if TYPE_CHECKING:
    from elastic_reshard.on_ray import Groups, Phase, Run

T = TypeVar("T")
QUICK = Deadlines(orphan_hold=4.0)
ROOT = Path(__file__).parents[2]
VARIABLE = "ELASTIC_RESHARD_RUNTIME"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_ENABLE_METRICS_COLLECTION": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
}  # fmt: skip


class RayNodes:
    """The cluster. Nodes are told apart by what they hold: CPUs, and one of a resource of their own name."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self._count, self.folder = 1, folder
        self.nodes: dict[str, Any] = {}
        head = {
            **self._common(),
            "num_cpus": 2,
            "include_dashboard": False,
            "temp_dir": folder,
            "resources": {"head": 9},
        }
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def _common(self) -> dict[str, Any]:
        # Ray takes 127.0.0.1 for "find another address", but not the rest of the loopback network.
        self._count += 1
        return {"node_ip_address": f"127.0.0.{self._count}", "object_store_memory": 80 << 20}

    def add(self, name: str, cpus: int = 2, **resources: float) -> str:
        """One more node, with more resources beside its own name; its id."""
        made = self.cluster.add_node(num_cpus=cpus, resources={name: 9, **resources}, **self._common())
        self.nodes[name] = made
        return str(made.node_id)

    def remove(self, name: str) -> None:
        """It dies at once, with all its workers (which outlive a raylet by up to seconds)."""
        node = self.nodes.pop(name)
        raylet = node.all_processes["raylet"][0].process.pid
        workers = [int(pid) for pid in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()]
        self.cluster.remove_node(node, allow_graceful=False)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Ray's control service does not answer any more."""
        os.kill(self._control(), signal.SIGSTOP)

    def thaw(self) -> None:
        """It answers again."""
        os.kill(self._control(), signal.SIGCONT)

    def kill_control(self) -> None:
        """It dies. Only with DURABLE = True in the module it can be started again, with all that it knew."""
        self._head.kill_gcs_server()

    def start_control(self) -> None:
        """It is back, at the same address."""
        self._head.start_gcs_server()

    @property
    def _head(self) -> Any:
        return self.cluster.head_node

    def _control(self) -> int:
        return int(self._head.all_processes["gcs_server"][0].process.pid)

    def drain(self, name: str, seconds: float) -> None:
        """The notice of a preemption, as a cloud's autoscaler gives it to Ray."""
        import ray
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        gcs = ray._private.worker.global_worker.gcs_client
        # Ray takes the moment by the wall clock.
        taken, why = gcs.drain_node(self.nodes[name].node_id, reason, "a test", int((time.time() + seconds) * 1000))
        assert taken, why


@pytest.fixture(scope="module")
def nodes(request: pytest.FixtureRequest) -> Iterator[RayNodes]:
    """A head of 2 CPUs on which only the driver is at home, and nodes "one" and "two"; nothing is left of it at the end.

    DURABLE = True in the module: Ray's control service keeps what it knows on the disk."""
    before = traces()
    folder = tempfile.mkdtemp(prefix="er")
    temporary = Path(folder) / "ray"  # where Ray looks for a cluster, too
    temporary.mkdir()
    environ = {**_QUIET, "RAY_TMPDIR": folder}
    if getattr(request.module, "DURABLE", False):
        environ |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{folder}/control"}
    kept = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    import ray

    made: RayNodes | None = None
    try:
        made = RayNodes(str(temporary))
        made.add("one")
        made.add("two")
        ray.init(
            address=made.cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False, logging_level="ERROR",
            namespace="tests",
        )  # fmt: skip
        yield made
    finally:
        ray.shutdown()
        if made is not None:
            made.cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    # What Ray's library holds in this process (its logs, its event loops) stays until this process ends.
    deadline = time.monotonic() + 10.0
    while (now := _outside(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not now, f"the cluster left behind: {now}"


def _outside(before: Traces) -> list[str]:
    """Processes and shared memory that were not there before."""
    now = traces()
    more = [command for at, command in now.processes.items() if at not in before.processes]
    return more + sorted(name for name in now.segments - before.segments if name.startswith(("er", "plasma", "ray")))


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Path]:
    """A runtime folder of the test's own, for its supervisor and its members."""
    folder = Path(tempfile.mkdtemp(prefix="er"))
    yield folder
    deadline = time.monotonic() + 5.0
    while (left := _with(folder)) and time.monotonic() < deadline:  # of a test that failed
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """As everywhere; but Ray's own workers and sockets, which last as long as the cluster, are looked at with its end."""
    if "nodes" not in request.fixturenames:
        before = traces()
        yield
        found = left_behind(before, 3.0)
        assert not found, "left behind: " + "; ".join(found)
        return
    request.getfixturevalue("nodes")
    folder: Path = request.getfixturevalue("runtime")
    held = _held()
    yield
    deadline = time.monotonic() + 10.0
    while (running := _with(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = [f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()[:200]!r}" for pid in running]
    assert not commands, f"processes of the job were left behind: {commands}"
    more = _held() - held
    assert not more, f"descriptors were left behind: {dict(more)}"


def _with(folder: Path) -> list[int]:
    """Processes that were started with this runtime folder: watchdogs, nurseries, movers."""
    wanted = f"{VARIABLE}={folder}".encode()  # or a folder in it
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if any(word.startswith(wanted) for word in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")):
                    found.append(int(name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def _held() -> Counter[str]:
    """Descriptors of this process that cannot be Ray's."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return Counter(link for link in links if "memfd:" in link or "eventfd" in link)


def until(condition: Callable[[], T | None], what: str, limit: float = 30.0) -> T:
    """Wait until it is something."""
    deadline = time.monotonic() + limit
    while True:
        found = condition()
        if found is not None and found is not False:
            return found
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.05)


def wait_for(groups: Groups, name: str, phase: Phase, attempt: int, limit: float = 120.0) -> Run:
    """A group's n-th attempt has come to a phase."""

    def there() -> Run | None:
        run = groups.status().get(name)
        return run if run is not None and run.phase is phase and run.attempt >= attempt else None

    try:
        return until(there, f"attempt {attempt} of {name} is {phase}", limit)
    except AssertionError as late:
        raise AssertionError(f"{late}; {groups.status()}") from None


def call(groups: Groups, name: str, method: str, *args: Any) -> Any:
    """Ask rank 0 of a group."""
    import ray

    return ray.get(getattr(groups.workers(name)[0], method).remote(*args), timeout=60)


def machine_dies(job: str, host: str, runtime: Path) -> None:
    """What a raylet's end leaves alive on this machine goes as well: the host's watchdog, and its movers."""
    record = running(job, host, runtime)
    assert record is not None
    for pid in [record.pid, *(hand.pid for hand in record.movers.values())]:
        os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    """Whether a process is there."""
    return Path(f"/proc/{pid}").exists()
