"""Ray: the supervisor as a named actor, members in the user's own actors, groups of actors that are started again.

    from elastic_reshard import on_ray

    on_ray.start("job", journal="/shared/job.journal")            # once; a detached actor that Ray restarts
    m = on_ray.join("job", name="trainer-0", role="source", ...)  # in the user's actors, as er.join

    with on_ray.Groups("job", [on_ray.Fleet("trainer", Trainer, size=2), on_ray.Fleet("engine", Engine, groups=4)]) as g:
        g.wait("trainer")                                         # started, replaced, resized meanwhile

Ray is imported here and nowhere else in the package; `ray.init` is the program's own business and comes first.
"""

from elastic_reshard.on_ray.events import Limits, Phase, Run
from elastic_reshard.on_ray.fleet import Fleet
from elastic_reshard.on_ray.groups import Groups
from elastic_reshard.on_ray.joining import Seat, join, seat, vouch
from elastic_reshard.on_ray.keeper import Found, client, close, find, start

__all__ = [
    "Fleet",
    "Found",
    "Groups",
    "Limits",
    "Phase",
    "Run",
    "Seat",
    "client",
    "close",
    "find",
    "join",
    "seat",
    "start",
    "vouch",
]
