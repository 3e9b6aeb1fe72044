"""Each kind of device."""

from __future__ import annotations

import pytest
import torch

from elastic_reshard.arena.device import Device
from tests.arena.helpers import first_device, warm


@pytest.fixture(scope="session", params=["pretend", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """A device of this process. For the session: a GPU once opened keeps its descriptors."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = first_device(request.param)
    warm(found)
    found.neighbours()
    return found
