"""A nursery's process. Started by `mover.nursery`, never by hand: its settings, the token too, come as JSON on stdin.

It leaves its starter's process tree first, while it is single-threaded and has loaded next to nothing.
"""

import json
import sys

from elastic_reshard.protocol.processes import leave


def main() -> None:
    """Read the settings, leave, fork movers until nobody needs it."""
    settings = json.loads(sys.stdin.buffer.read())
    leave(settings["log"])
    from elastic_reshard.mover.forkserver import serve

    serve(settings)


if __name__ == "__main__":
    main()
