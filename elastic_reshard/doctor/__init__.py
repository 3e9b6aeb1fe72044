"""What this machine can do (`elastic-reshard doctor`), and what can be had of a job after a failure (`bundle`)."""

from elastic_reshard.doctor.facts import Facts, Finding, Mark
from elastic_reshard.doctor.judge import judge

__all__ = ["Facts", "Finding", "Mark", "judge"]
