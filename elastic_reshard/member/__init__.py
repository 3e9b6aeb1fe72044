"""The user's side: join, publish, watch, install, leave. No thread of ours touches live tensors."""

from elastic_reshard.member.publisher import Publication
from elastic_reshard.member.session import Group, Member, join
from elastic_reshard.member.watcher import Event

__all__ = ["Event", "Group", "Member", "Publication", "join"]
