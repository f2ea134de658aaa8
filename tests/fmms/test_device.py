"""fmms.device: facts belong to the device asked about."""

import threading
from types import SimpleNamespace

import pytest
import torch

from fmms import device

FAKES = [
    SimpleNamespace(
        name="first", major=9, minor=0, multi_processor_count=132, shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=60 << 20,
        total_memory=150 << 30,
    ),
    SimpleNamespace(name="second", major=8, minor=6, multi_processor_count=28, total_memory=12 << 30),
]  # fmt: skip


@pytest.fixture
def two_gpus(monkeypatch):
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "index", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FAKES[index])
    return current


def test_each_device_has_its_own_facts(two_gpus):
    first, second = device.facts("cuda:0"), device.facts(torch.device("cuda", 1))
    assert (first.name, first.capability, first.sm_count) == ("first", (9, 0), 132)
    assert (first.shared_memory_per_block, first.shared_memory_per_sm, first.l2_bytes) == (232448, 233472, 60 << 20)
    assert (second.name, second.capability, second.sm_count) == ("second", (8, 6), 28)
    assert second.total_memory_bytes == 12 << 30
    assert (second.shared_memory_per_block, second.shared_memory_per_sm, second.l2_bytes) == (None, None, None)
    assert device.facts(1) == second


def test_the_current_device_is_looked_up_each_time(two_gpus):
    assert device.facts("cuda").name == "first"
    two_gpus.index = 1
    assert device.facts("cuda").name == "second"


def test_threads_see_their_own_device(two_gpus):
    faults = []

    def ask(index):
        two_gpus.index = index
        for _ in range(500):
            if device.facts("cuda").name != FAKES[index].name or device.facts(1 - index).name == FAKES[index].name:
                faults.append(index)

    threads = [threading.Thread(target=ask, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_no_such_device_is_said(monkeypatch, two_gpus):
    with pytest.raises(ValueError, match="device is 'cpu'; expected a GPU"):
        device.facts("cpu")
    with pytest.raises(ValueError, match="the GPUs here are cuda:0 to cuda:1"):
        device.facts("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        device.facts("cuda")


@pytest.mark.gpu
def test_a_real_gpu():
    found = device.facts("cuda")
    assert found.name == torch.cuda.get_device_name()
    assert found.sm_count > 0
    assert found.total_memory_bytes > 1 << 30
