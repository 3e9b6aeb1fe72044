"""The bare collective call inside the callers' processes, and the gather-and-broadcast baseline that it is measured against."""

from elastic_reshard.collective.groups import close_all
from elastic_reshard.collective.reshard import Handle, Report, reshard

__all__ = ["Handle", "Report", "close_all", "reshard"]
