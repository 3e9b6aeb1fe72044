"""One side's joined layout as it is told: a content id, a body, and the correspondences that came with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import xxhash

from elastic_reshard.errors import LayoutError
from elastic_reshard.layout.correspondence import Correspondence
from elastic_reshard.layout.fragments import (
    canonical,
    correspondences_from_data,
    correspondences_to_data,
    model_from_data,
    model_to_data,
)
from elastic_reshard.layout.model import ModelLayout

__all__ = ["Side"]


@dataclass(frozen=True, eq=False)
class Side:
    """One side's layout, and for a destination the correspondences that its members gave (None: same names)."""

    model: ModelLayout
    correspondences: tuple[Correspondence, ...] | None = None

    @cached_property
    def id(self) -> str:
        """The layout id of the view: 32 hex digits."""
        if self.correspondences is None:
            return self.model.content_id
        said = canonical({"correspondences": correspondences_to_data(self.correspondences)})
        return xxhash.xxh3_128(self.model.content_id.encode() + said).hexdigest()

    @cached_property
    def body(self) -> bytes:
        """What GET /v1/layouts/ID answers."""
        told = None if self.correspondences is None else correspondences_to_data(self.correspondences)
        return canonical({"tensors": model_to_data(self.model), "correspondences": told})

    @classmethod
    def of_body(cls, body: bytes) -> Side:
        """From what GET /v1/layouts/ID answers. LayoutError for anything else."""
        try:
            data = json.loads(body)
            told = data["correspondences"]
            found = None if told is None else correspondences_from_data(told)
            return cls(model_from_data(data["tensors"]), found)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, LayoutError):
                raise
            raise LayoutError(f"not the body of a layout: {error!r}") from error
