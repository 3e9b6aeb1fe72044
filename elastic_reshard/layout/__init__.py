"""Layouts: where tensors lie, in DTensor's words. Pure; only `dtensor.py` imports torch, and nothing here imports it."""

from elastic_reshard.layout.box import Box
from elastic_reshard.layout.correspondence import Correspondence
from elastic_reshard.layout.mesh import Mesh
from elastic_reshard.layout.model import ModelLayout, WireDtype, match
from elastic_reshard.layout.placements import Declared, Partial, Placement, Replicate, Shard, StridedShard
from elastic_reshard.layout.tensor import DeclaredBox, TensorLayout

__all__ = [
    "Box",
    "Correspondence",
    "Declared",
    "DeclaredBox",
    "Mesh",
    "ModelLayout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "TensorLayout",
    "WireDtype",
    "match",
]
