"""A nursery's process. Started by `mover.nursery`, never by hand: its settings, the token too, come as JSON on stdin.

It leaves its starter's process tree first, while it is single-threaded and has loaded next to nothing.
"""

import json
import sys
from pathlib import Path

from elastic_reshard.protocol.processes import Lock, leave


def main() -> None:
    """Read the settings, leave, fork movers until nobody needs it."""
    settings = json.loads(sys.stdin.buffer.read())
    leave(settings["log"])
    lock = Lock.inherited(Path(settings["lock_path"]), settings["lock"])
    from elastic_reshard.mover.forkserver import serve

    serve(settings, lock)


if __name__ == "__main__":
    main()
