"""Bitmaps as they travel in JSON: one bit a cell, most significant first, deflated, base64. "" is nothing set."""

from __future__ import annotations

import base64
import binascii
import zlib

from elastic_reshard.errors import ProtocolError

__all__ = ["pack", "unpack"]


def pack(bits: bytes) -> str:
    """From a bitmap (`numpy.packbits`)."""
    return base64.b64encode(zlib.compress(bits, 1)).decode() if any(bits) else ""


def unpack(text: str, count: int) -> bytes:
    """A bitmap of `count` bits. Raises ProtocolError if `text` is none of that length; never grows beyond it."""
    nbytes = -(-count // 8)
    if not text:
        return bytes(nbytes)
    try:
        inflate = zlib.decompressobj()
        found = inflate.decompress(base64.b64decode(text, validate=True), nbytes + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ProtocolError(f"a bitmap that cannot be read: {error}") from error
    if len(found) != nbytes:
        raise ProtocolError(f"a bitmap of {len(found)} or more bytes where {count} cells need {nbytes}")
    return found
