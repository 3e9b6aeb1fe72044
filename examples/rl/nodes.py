"""The Ray cluster of a run, on this machine: a head that stays, and nodes that are preempted as a schedule says.

Each node is a raylet with a loopback address of its own; members on it are a host of their own for elastic_reshard, so that
weights go from node to node by movers. When a node is lost, all that ran on it is SIGKILLed, the host's watchdog included.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Final, Self

from elastic_reshard.on_ray.cluster import host_of
from elastic_reshard.watchdog.runtime import running

__all__ = ["EXAMPLES", "Nodes"]

EXAMPLES: Final = Path(__file__).parents[1]
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_ENABLE_METRICS_COLLECTION": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1", "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "GLOO_SOCKET_IFNAME": "lo",
    # A machine that is gone answers no health check: with Ray's own settings that is believed after 15 s.
    "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}  # fmt: skip


class Nodes:
    """The cluster; a context manager. `ray.init` is done here too: the driver is at home on the head."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.folder = tempfile.mkdtemp(prefix="er")
        self.runtime = Path(self.folder) / "run"
        self._count = 1
        self._nodes: dict[str, Any] = {}
        self._doomed: dict[str, float] = {}
        self._cluster: Any = None

    def __enter__(self) -> Self:
        paths = [str(EXAMPLES), str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(_QUIET)
        os.environ.update({"RAY_TMPDIR": self.folder, "PYTHONPATH": os.pathsep.join(paths)})
        from ray.cluster_utils import Cluster

        ray = _ray()
        temporary = Path(self.folder) / "ray"
        temporary.mkdir()
        self.runtime.mkdir(mode=0o700)
        try:
            head = {**self._common(), "num_cpus": 2, "include_dashboard": False, "temp_dir": str(temporary)}
            self._cluster = Cluster(initialize_head=True, head_node_args={**head, "resources": {"head": 9}})
            ray.init(
                address=self._cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False, logging_level="ERROR",
                namespace=self.job,
            )  # fmt: skip
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        _ray().shutdown()
        for name in list(self._nodes):
            self.kill(name)
        if self._cluster is not None:
            self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _common(self) -> dict[str, Any]:
        # Ray takes 127.0.0.1 for "find another address", but not the rest of the loopback network.
        self._count += 1
        return {"node_ip_address": f"127.0.0.{self._count}", "object_store_memory": 80 << 20}

    def add(self, name: str) -> None:
        """One more node, with room for one group of what its name says. Blocks a second or two."""
        kind = name.rpartition("-")[0]
        self._nodes[name] = self._cluster.add_node(num_cpus=2, resources={kind: 2}, **self._common())

    def kill(self, name: str) -> None:
        """The machine goes, with every process on it."""
        node = self._nodes.pop(name)
        self._doomed.pop(name, None)
        raylet = node.all_processes["raylet"][0].process.pid
        on_it = _descendants(raylet)
        record = running(self.job, host_of(str(node.node_id)), self.runtime)
        if record is not None:
            on_it += [record.pid, *(hand.pid for hand in record.movers.values())]
        for pid in [raylet, *on_it]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, name: str, seconds: float) -> None:
        """The notice of a preemption, as a cloud's autoscaler gives it to Ray; `sweep` carries it out."""
        from ray.core.generated import autoscaler_pb2

        kinds: Any = autoscaler_pb2
        reason = kinds.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        gcs = _ray()._private.worker.global_worker.gcs_client
        # Ray takes the moment by the wall clock.
        gcs.drain_node(self._nodes[name].node_id, reason, "preempted", int((time.time() + seconds) * 1000))
        self._doomed[name] = time.monotonic() + seconds

    def sweep(self) -> list[str]:
        """Kill nodes whose notice is over; their names."""
        over = [name for name, at in self._doomed.items() if time.monotonic() >= at]
        for name in over:
            self.kill(name)
        return over


def _ray() -> Any:
    """Imported late: the environment of the cluster is set before. Some of it has no types."""
    import ray

    return ray


def _descendants(root: int) -> list[int]:
    found, look = [], [root]
    while look:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pid = look.pop()
            for thread in os.listdir(f"/proc/{pid}/task"):
                children = [int(c) for c in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
                found += children
                look += children
    return found
