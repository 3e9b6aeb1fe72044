"""Prepared copies of arrays and tensors on the host and on devices, in any mix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elastic_reshard.arena import Copies, HostArena
from elastic_reshard.arena.boxes import array_at
from elastic_reshard.arena.copies import raw, strided_tensor
from elastic_reshard.arena.device import Device
from elastic_reshard.arena.pretend import open_pretend
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError
from tests.arena.helpers import first_device, numbers, on_device


def test_a_mix_of_hosts_and_devices_arrives(device: Device) -> None:
    arena = HostArena(1 << 20)
    registered = device.host(arena.bytes)
    host = arena.bytes[: 64 * 96 * 4].view(np.uint32).reshape(64, 96)
    host[:] = numbers(host.size, 4).reshape(64, 96)
    plain, back = np.zeros_like(host), arena.bytes[1 << 19 :][: host.nbytes].view(np.uint32).reshape(64, 96)
    one, two = on_device(device, np.zeros_like(host)), on_device(device, np.zeros_like(host))
    first, second, third = Copies(), Copies(), Copies()
    assert Copies().device is None
    first.add(one, host)
    first.add(plain[3:9, 2:50], host[3:9, 2:50])
    second.add(two[..., 0:48], one[..., 48:96])
    third.add(back, two)
    assert [c.nbytes for c in (first, second, third)] == [host.nbytes + 6 * 48 * 4, host.nbytes // 2, host.nbytes]
    assert [len(c) for c in (first, second, third)] == [2, 1, 1]
    assert first.device is device
    for copies in (first, second, third):
        copies.prepare()
    for _ in range(2):
        stream = device.stream()
        for copies in (first, second, third):
            copies.run(stream)
        stream.synchronize()
        wanted = np.zeros_like(host)
        wanted[:, :48] = host[:, 48:]
        assert np.array_equal(back, wanted)
        assert np.array_equal(plain[3:9, 2:50], host[3:9, 2:50])
        back[:] = 0
    registered.close()


def test_without_a_stream_copies_follow_the_callers_own(device: Device) -> None:
    one, two = on_device(device, np.zeros(4096, np.uint16)), on_device(device, np.zeros(4096, np.uint16))
    source, target = device.tensor(one, torch.bfloat16), device.tensor(two, torch.bfloat16)
    copies = Copies()
    copies.add(raw(target), raw(source))
    for value in (1.0, 2.0):
        source.fill_(value)
        copies.run()
        seen = target.clone()
        assert torch.equal(seen.cpu(), torch.full((4096,), value, dtype=torch.bfloat16))


def test_copies_and_casts_go_to_the_stream_that_is_given() -> None:
    device = first_device("pretend")  # whose streams put work off until they are asked
    one, two = on_device(device, numbers(64, 2)), on_device(device, np.zeros(64, np.uint16))
    copied, cast = (
        device.tensor(two, torch.int16),
        device.tensor(on_device(device, np.zeros(64, np.uint32)), torch.int32),
    )
    copies = Copies()
    copies.add(two, one)
    copies.cast(cast, device.tensor(one, torch.int16))
    stream = device.stream()
    copies.run(stream)
    assert not copied.any()
    assert not cast.any()
    stream.synchronize()
    assert torch.equal(copied, torch.arange(64, dtype=torch.int16))
    assert torch.equal(cast, torch.arange(64, dtype=torch.int32))


def test_casts_on_a_device_run_with_the_copies(device: Device) -> None:
    masters = [device.tensor(on_device(device, np.zeros(n, np.uint32)), torch.float32) for n in (100, 4096)]
    slots = [device.tensor(on_device(device, np.zeros(m.numel(), np.uint16)), torch.bfloat16) for m in masters]
    host = torch.zeros(100)
    copies = Copies()
    for slot, master in zip(slots, masters, strict=True):
        copies.cast(slot, master.requires_grad_())
    copies.cast(host, slots[0])
    assert (len(copies), copies.device, copies.nbytes) == (3, device, 2 * 4196 + 400)
    with torch.no_grad():
        for i, master in enumerate(masters):
            master.copy_(torch.arange(master.numel()) * 0.37 + i)
    copies.run()
    device.current().synchronize()
    for i, slot in enumerate(slots):
        assert torch.equal(slot.cpu(), (torch.arange(slot.numel()) * 0.37 + i).to(torch.bfloat16))
        assert not slot.requires_grad


def test_what_raw_gives_is_where_the_tensor_is(device: Device) -> None:
    there = device.tensor(on_device(device, numbers(12, 2).reshape(3, 4)), torch.bfloat16)
    found = raw(there.t())
    assert isinstance(found, Strided)
    assert (found.address, found.shape, found.strides, found.device) == (there.data_ptr(), (4, 3), (2, 8), device)
    assert strided_tensor(found, torch.bfloat16).shape == (4, 3)
    here = raw(torch.zeros(3, 4, dtype=torch.bfloat16).t())
    assert isinstance(here, np.ndarray)
    assert here.shape == (4, 3)
    for lazy in (torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64).conj().imag):
        with pytest.raises(ArenaError, match="resolve_conj"):
            raw(lazy)


def test_what_cannot_be_copied_is_refused(device: Device) -> None:
    there = on_device(device, numbers(16, 4))
    copies = Copies()
    with pytest.raises(ArenaError, match="cannot copy"):
        copies.add(there, np.zeros(15, np.uint32))
    with pytest.raises(ArenaError, match="cannot copy"):
        copies.add(np.zeros(16, np.uint16), there)
    with pytest.raises(ArenaError, match="cannot cast"):
        copies.cast(torch.zeros(3), torch.zeros(4))
    copies.add(np.zeros(16, np.uint32), there)
    with pytest.raises(ArenaError, match="not registered"):
        copies.run()


def test_what_several_prepared_is_one_launch_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [open_pretend(n) for n in (0, 1)]
    launched: list[str] = []
    for device in devices:
        run = device.copy
        monkeypatch.setattr(device, "copy", lambda *a, run=run, name=device.id: (launched.append(name), run(*a))[1])
    sources = [np.asarray(numbers(96, 2)) + n for n in range(4)]
    there = [on_device(devices[n // 2], source) for n, source in enumerate(sources)]
    targets = [on_device(devices[n // 2], np.zeros(96, np.uint16)) for n in range(4)]
    plain = np.zeros(96, np.uint16)
    host = HostArena(1 << 16)
    registered = devices[1].host(host.bytes)
    near = host.bytes[:192].view(np.uint16)
    apart = [Copies() for _ in range(6)]
    for copies, target, source in zip(apart, targets, there, strict=False):
        copies.add(target, source)
        copies.prepare()
    apart[4].add(plain, sources[3])
    apart[5].add(near, there[3])
    together = Copies()
    together.extend(apart)
    assert (len(together), together.nbytes) == (6, 6 * 192)
    assert together.devices == tuple(devices)
    together.run()
    assert launched == [devices[0].id, devices[1].id, devices[1].id]  # host memory is reached in another way
    assert np.array_equal(near, sources[3])
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(array_at(target), source)
    assert np.array_equal(plain, sources[3])
    registered.close()
