"""Element types by name. No torch here: the supervisor and the planner know sizes, not kernels."""

from __future__ import annotations

from typing import Final

from elastic_reshard.errors import LayoutError

__all__ = ["ITEMSIZE", "is_castable", "itemsize"]

# Every dtype of torch with whole bytes per element; names as in `str(torch.dtype)` after "torch.".
ITEMSIZE: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

# Types between which a cast at the source may be asked for: plain real floating point, nothing packed.
_CASTABLE: Final = frozenset(
    {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    }
)


def itemsize(dtype: str) -> int:
    """Bytes per element. LayoutError for a name that is not a torch dtype with whole bytes per element."""
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise LayoutError(
            f"unknown dtype {dtype!r}; use a torch dtype's name without 'torch.', one of {', '.join(ITEMSIZE)}"
        ) from None


def is_castable(source: str, wire: str) -> bool:
    """Whether a cast may be asked for: between floating-point types only, never integers or bool."""
    return source in _CASTABLE and wire in _CASTABLE
