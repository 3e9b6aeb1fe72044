"""Communicators: formed over a cancellable store, changed once, ended under a deadline whatever the backend does."""

from elastic_reshard.communicator.base import Backend, Capabilities, Communicator, Name, check_configs
from elastic_reshard.communicator.change import Choice, Way, change, choose
from elastic_reshard.communicator.gloo import GlooBackend, GlooCommunicator
from elastic_reshard.communicator.guard import Guarded
from elastic_reshard.communicator.registry import Registry, Report
from elastic_reshard.communicator.store import ControlStore

__all__ = [
    "Backend",
    "Capabilities",
    "Choice",
    "Communicator",
    "ControlStore",
    "GlooBackend",
    "GlooCommunicator",
    "Guarded",
    "Name",
    "Registry",
    "Report",
    "Way",
    "change",
    "check_configs",
    "choose",
]
