"""What every message has in common: immutable, validated, no unknown fields."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Count", "Hex", "MemberName", "Message", "Name", "Role", "Text", "fitting"]

# Names are in paths, logs, tickets and error messages.
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
MemberName = Annotated[str, Field(min_length=1, max_length=160, pattern=r"^[A-Za-z0-9._-]+@[0-9a-f]{16}$")]
Hex = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9a-f]+$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_LONGEST: Final = 4096
Text = Annotated[str, Field(max_length=_LONGEST)]
Role = Literal["source", "destination"]


class Message(BaseModel):
    """Immutable; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def fitting(text: str) -> str:
    """As much of it as a Text may hold. Readers check that, `model_copy` does not: whoever copies a text of unknown length into
    a document cuts it."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
