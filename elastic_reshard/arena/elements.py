"""Elements of numpy's arrays as torch's, and back: by their size alone, for each has types that the other has not."""

from __future__ import annotations

import warnings
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BITS", "tensor_over"]

# Same size, any strides: torch has no unsigned types with full support, and numpy has no bf16 or fp8.
BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_NUMPY: Final = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def tensor_over(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """The array's memory as a tensor of that dtype, no copy. The caller does not write to a read-only one."""
    if array.flags.writeable:
        return torch.from_numpy(array.view(_NUMPY[array.dtype.itemsize])).view(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array.view(_NUMPY[array.dtype.itemsize])).view(dtype)
