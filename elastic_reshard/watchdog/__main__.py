"""A watchdog's process. Started by `watchdog.start`, never by hand: its settings, the token too, come as JSON on stdin.

It leaves its starter's process tree first, while it is single-threaded and has loaded next to nothing: it outlives the
starter, is nobody's child, and works when the starter is a daemonic worker. The first fork of the two was the starter's.
"""

import json
import sys
from pathlib import Path

from elastic_reshard.protocol.processes import Lock, leave


def main() -> None:
    """Read the settings, leave, run until there is nothing to guard."""
    settings = json.loads(sys.stdin.buffer.read())
    leave(settings["log"])
    lock = Lock.inherited(Path(settings["lock_path"]), settings["lock"])
    from elastic_reshard.protocol.hooks import hook

    hook("watchdog.left")
    from elastic_reshard.watchdog.service import run

    run(settings, lock)


if __name__ == "__main__":
    main()
