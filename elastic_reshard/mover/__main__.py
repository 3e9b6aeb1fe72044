"""A nursery's process. Started by `mover.nursery`, never by hand: its settings, the token too, come as JSON on stdin.

It leaves its starter's process tree first, while it is single-threaded and has loaded next to nothing.
"""

import json
import os
import sys


def _leave(log: str) -> None:
    """A session of its own, whose leader goes at once; the starter's descriptors are gone, output goes to the log."""
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, target)
    os.close(null)
    os.close(out)


def main() -> None:
    """Read the settings, leave, fork movers until nobody needs it."""
    settings = json.loads(sys.stdin.buffer.read())
    _leave(settings["log"])
    from elastic_reshard.mover.forkserver import serve

    serve(settings)


if __name__ == "__main__":
    main()
