"""Which backend carries a transfer, by the name of its network; and what a member can state of them without forming any."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Final

from elastic_reshard.arena.device import Device
from elastic_reshard.communicator.base import Backend
from elastic_reshard.errors import ArenaError, ReshardError
from elastic_reshard.log import logger
from elastic_reshard.mover.part import NETWORKS

__all__ = ["GLOO", "backend_of", "networks_of"]

_log = logger("mover")
GLOO: Final = "gloo"


def backend_of(network: str, device: Device | None) -> Backend:
    """A backend of this process. ArenaError for a network that uses a device where there is none, or one that this version
    does not know; what the backend raises where it can't work."""
    if network == GLOO:
        from elastic_reshard.communicator.gloo import GlooBackend

        return GlooBackend()
    whole, network = network, NETWORKS.get(network, network)
    if device is None:
        raise ArenaError(f"network {whole} sends from a device, but the member of this mover stated none")
    if network == "pretend" and device.kind == "pretend":
        from elastic_reshard.communicator.pretend import PretendBackend

        return PretendBackend(device)
    if network == "nccl" and device.kind == "cuda":
        from elastic_reshard.communicator.nccl import NcclBackend

        return NcclBackend(device)
    raise ArenaError(f"network {whole} does not go with {device.kind} device {device.id}; nothing was moved")


def networks_of(device: Device | None, *, arenas: bool = True) -> dict[str, str]:
    """What movers of this machine can move over besides gloo from this device: the config of each, by name. Nothing is formed;
    what is missing for it is a log event. arenas: whether the arenas lie on the device, which M2N needs."""
    if device is None:
        return {}
    network = "pretend" if device.kind == "pretend" else "nccl"
    if network == "nccl" and find_spec("nccl") is None:
        _log.warning(
            "network.missing", network=network, why="nccl4py is not installed (pip install elastic-reshard[gpu])"
        )
        return {}
    try:
        config = backend_of(network, device).config
        return {network: config, **(_with_m2n(network, config) if arenas else {})}
    except ReshardError as error:
        _log.warning("network.missing", network=network, why=str(error))
        return {}


def _with_m2n(network: str, config: str) -> dict[str, str]:
    """The same with M2N, where it is there."""
    name = f"{network}_m2n"
    if network == "pretend":
        return {name: f"{config} m2n"}
    try:
        return {name: f"{config} m2n={metadata.version('nccl-extensions')}"}
    except metadata.PackageNotFoundError:
        return {}
