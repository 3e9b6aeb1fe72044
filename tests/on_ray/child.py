"""A member in a child process of an actor, which knows nothing of Ray: its seat comes as a line of JSON."""

from __future__ import annotations

import json
import sys

import torch

import elastic_reshard as er


def main() -> None:
    said = json.loads(sys.stdin.readline())
    assert "ray" not in sys.modules
    layout = er.ModelLayout({"w": er.TensorLayout((4,), "float32", er.Mesh.arange((1,), ("rank",)), (er.Shard(0),))})
    member = er.join(
        said["url"], token=said["token"], host=said["host"], name="child", role="destination",
        group=er.Group("child", 1, 0), tensors={"w": torch.zeros(4)}, layout=layout, runtime=said["runtime"],
    )  # fmt: skip
    print(member.id, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
