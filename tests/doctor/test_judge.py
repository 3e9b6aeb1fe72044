"""The doctor's judgement: a healthy machine has nothing to do; each fault is found, and says what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_reshard.doctor.facts import Facts, Gpu, Gpus
from elastic_reshard.doctor.judge import judge

GIB = 1 << 30


def healthy() -> Facts:
    facts = Facts(
        kernel="6.8.0-45-generic", python="3.11.7", processors=8, packages={"torch": "2.11.0", "ray": "2.60.0"}
    )
    return replace(
        facts,
        memory=replace(facts.memory, shm=8 * GIB, available=64 * GIB),
        network=replace(facts.network, chosen="eth0 (10.0.0.1)", candidates=("lo (127.0.0.1)", "eth0 (10.0.0.1)")),
        runtime=replace(facts.runtime, path="/run/user/1000/elastic_reshard", longest=90),
    )


def with_gpus(**changes: Any) -> Facts:
    found = tuple(Gpu(f"GPU-{i}", "NVIDIA H200", 140 * GIB) for i in range(2))
    gpus = replace(Gpus("", "580.65", "13.0", found), **changes)
    packages = {"torch": "2.11.0", "ray": "2.60.0"}
    return replace(healthy(), gpus=gpus, nccl="2.30.7", packages=packages)


def changed(part: str, **changes: Any) -> Facts:
    facts = healthy()
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})


def test_a_healthy_machine_has_nothing_to_do() -> None:
    for facts in (healthy(), with_gpus()):
        assert [f for f in judge(facts) if f.mark != "ok" or f.todo] == []


@pytest.mark.parametrize(
    ("facts", "name", "mark", "said", "todo"),
    [
        (replace(healthy(), kernel="4.19.0"), "system", "bad", "4.19.0", "5.4"),
        (changed("memory", memfd="memfd_create: Operation not permitted"), "memfd", "bad", "not permitted", "seccomp"),
        (changed("memory", seals="a sealed memfd could be shrunk"), "seals", "bad", "shrunk", "SIGBUS"),
        (changed("memory", shm=None), "/dev/shm", "warn", "not there", "mount"),
        (changed("memory", shm=64 << 20), "/dev/shm", "warn", "0.1 GiB", "emptyDir"),
        (changed("memory", available=GIB // 2), "memory", "warn", "0.5 GiB", "limit"),
        (changed("memory", limit=8 * GIB, used=8 * GIB - 1), "memory", "warn", "0.0 GiB", "limit"),
        (changed("processes", pidfd="pidfd_open: no"), "pidfd", "bad", "pidfd_open: no", "condemned"),
        (changed("processes", pass_fds="no"), "descriptors between processes", "bad", "no", "host"),
        (changed("processes", vm_read="EPERM", yama=2), "process_vm_readv", "warn", "ptrace_scope is 2", "SYS_PTRACE"),
        (changed("descriptors", hard=1024), "open files", "bad", "1024", "65536"),
        (changed("runtime", fault="/x belongs to user 7"), "runtime folder", "bad", "user 7", "ELASTIC_RESHARD_RUNTIME"),
        (changed("runtime", longest=108), "runtime folder", "bad", "108 bytes", "shorter"),
        (changed("runtime", kind="nfs4"), "runtime folder", "warn", "nfs4", "local"),
        (changed("runtime", free=1 << 20), "runtime folder", "warn", "1 MiB", "free"),
        (changed("network", fault="no such interface"), "network", "bad", "no such", "eth0 (10.0.0.1)"),
        (changed("network", loopback=True, chosen="lo (127.0.0.1)"), "network", "warn", "lo", "ELASTIC_RESHARD_INTERFACE"),
        (changed("network", port_taken="another process"), "supervisor's port", "warn", "29700", "--port"),
        (changed("network", ports=(60000, 60100)), "ports of movers", "warn", "60000 to 60100", "ip_local_port_range"),
        (changed("clock", lag=0.4), "clock", "warn", "400 ms", "cpu.max"),
        (replace(healthy(), packages={}), "torch", "bad", "not installed", "pip install torch"),
        (replace(healthy(), packages={"torch": "2.4.1"}), "torch's version", "warn", "2.4.1", "2.11"),
        (with_gpus(found=()), "GPUs", "warn", "no GPU is visible", "container"),
        (with_gpus(mps=(77,)), "CUDA MPS", "bad", "process 77", "nvidia-cuda-mps-control"),
        (replace(healthy(), gpus=Gpus(mps=(77,))), "CUDA MPS", "bad", "process 77", "nvidia-cuda-mps-control"),
        (with_gpus(driver="515.1"), "GPU driver", "bad", "515.1", "525"),
        (with_gpus(apart=((0, 1),)), "peer memory", "warn", "0-1", "by movers"),
        (with_gpus(found=(Gpu("GPU-0", "H200", mig=True),)), "MIG", "warn", "GPU-0", "MIG off"),
        (with_gpus(found=(Gpu("GPU-0", "GB200", fabric="in progress"),)), "NVLink fabric", "warn", "in progress", "fabric"),
        (
            with_gpus(
                found=(
                    Gpu("GPU-0", "GB200", fabric="completed", cluster="ab", clique=1),
                    Gpu("GPU-1", "GB200", fabric="completed", cluster="ab", clique=2),
                )
            ),
            "NVLink fabric", "warn", "clique 2", "cliques",
        ),
        (replace(with_gpus(), nccl=""), "NCCL", "warn", "no NCCL", "pip install"),
        (
            replace(with_gpus(), packages={"torch": "2.11.0", "nccl-extensions": "0.1.0"}),
            "nccl-extensions", "warn", "do not return in 25 s", "SIGKILL",
        ),
        (
            replace(with_gpus(), packages={"torch": "2.11.0", "nccl4py": "0.3.1.post1"}),
            "nccl4py", "warn", "abort", "SIGKILL",
        ),
    ],
)  # fmt: skip
def test_each_fault_is_found_and_says_what_to_do(facts: Facts, name: str, mark: str, said: str, todo: str) -> None:
    found = [f for f in judge(facts) if f.name == name]
    assert len(found) == 1, [f.name for f in judge(facts)]
    assert found[0].mark == mark
    assert said in found[0].said
    assert todo in found[0].todo
    others = {f.name for f in judge(facts) if f.mark != "ok"} - {name}
    assert not others, "one fault is one finding"


def test_versions_of_which_nothing_is_known_are_said_to_be_just_that() -> None:
    facts = replace(with_gpus(), nccl="2.99.1", packages={"torch": "2.11.0", "nccl-extensions": "7.0"})
    found = {f.name: f for f in judge(facts)}
    assert "measured 2.30.7" in found["NCCL"].said
    assert "nothing bad is known" in found["nccl-extensions"].said
    assert found["nccl-extensions"].mark == "ok"


def test_gpus_that_share_a_fabric_are_named_by_it() -> None:
    gpu = Gpu("GPU-0", "GB200", fabric="completed", cluster="ab", clique=3)
    found = {f.name: f for f in judge(with_gpus(found=(gpu,)))}
    assert (found["NVLink fabric"].mark, found["NVLink fabric"].said.partition(";")[0]) == (
        "ok", "cluster ab, clique 3",
    )  # fmt: skip
    assert "a domain is one host" in found["NVLink fabric"].said
