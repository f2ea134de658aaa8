"""What a GPU is, read for the device that is asked about and never remembered for "the" device.

Two GPUs of one host may differ, and a process may be handed another one: so nothing is cached here (PyTorch keeps the
driver's answer per device), and threads share nothing.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of one GPU; None where PyTorch or the driver doesn't tell."""

    name: str
    capability: tuple[int, int]
    """Compute capability, such as (9, 0)."""
    sm_count: int
    """Streaming multiprocessors (AMD: compute units)."""
    shared_memory_per_block: int | None
    """Bytes that one block can have at most, the opt-in limit where there is one."""
    shared_memory_per_sm: int | None
    """Bytes of one multiprocessor."""
    l2_bytes: int | None
    total_memory_bytes: int


def facts(device: torch.device | str | int) -> DeviceFacts:
    """Facts of `device`: "cuda" (the current one), "cuda:1", an index or a torch.device; safe in any thread.

    Raises ValueError for a device that is no GPU or that this machine doesn't have.
    """
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device is {str(device)!r}; expected a GPU, such as 'cuda' or 'cuda:1'")
    count = torch.cuda.device_count()
    if not count:
        raise ValueError(f"device is {str(device)!r}, but torch finds no GPU here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ValueError(f"device is {str(device)!r}, but the GPUs here are cuda:0 to cuda:{count - 1}")
    found = torch.cuda.get_device_properties(index)
    # named differently, or missing, in some builds of PyTorch
    block = getattr(found, "shared_memory_per_block_optin", None) or getattr(found, "shared_memory_per_block", None)
    return DeviceFacts(
        name=found.name,
        capability=(found.major, found.minor),
        sm_count=found.multi_processor_count,
        shared_memory_per_block=block,
        shared_memory_per_sm=getattr(found, "shared_memory_per_multiprocessor", None),
        l2_bytes=getattr(found, "L2_cache_size", None),
        total_memory_bytes=found.total_memory,
    )
