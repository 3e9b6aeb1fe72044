"""Correspondences: which box of which source tensor becomes which box of which destination tensor.

Same-named whole tensors are the default. Fused parameters (q, k and v into one) are several correspondences with one
destination; a transposed parameter is one with `permute`.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_reshard.layout.box import Box

__all__ = ["Correspondence"]


@dataclass(frozen=True, slots=True)
class Correspondence:
    """Destination dim d is source dim permute[d] (torch.permute's rule; None: the same order). Boxes are in each side's
    own global coordinates; None means the whole tensor. Shapes must agree after the permutation."""

    source: str
    destination: str
    source_box: Box | None = None
    destination_box: Box | None = None
    permute: tuple[int, ...] | None = None
