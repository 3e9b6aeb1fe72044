"""Names of things that can outlive their time: members, publications, tickets, arenas, layouts."""

from __future__ import annotations

import uuid
from typing import Final

__all__ = ["PROTOCOL", "incarnation", "member_id", "name_of", "publication_id", "ticket_id", "transfer_id"]

# Both ends of a connection say it first; unlike versions part with an error that names both.
PROTOCOL: Final = 2


def incarnation() -> str:
    """16 hex digits, fresh for every start of a process."""
    return uuid.uuid4().hex[:16]


def member_id(name: str, of: str) -> str:
    """A member is its name and its incarnation, never a rank number."""
    return f"{name}@{of}"


def name_of(member: str) -> str:
    """The user's name of a member."""
    return member.rpartition("@")[0]


def publication_id(term: int, weight_version: int) -> str:
    """Minted once: a term gives each version once, and terms never come again."""
    return f"p{weight_version}.{term}"


def ticket_id(group: str, publication: str, term: int, attempt: int) -> str:
    """One permission of one group to install one publication once."""
    return f"{group}:{publication}:{term}.{attempt}"


def transfer_id(publication: str, term: int, epoch: int) -> str:
    """One epoch's attempt to land what a publication lacks somewhere; epochs only rise within a term."""
    return f"{publication}:{term}.{epoch}"
