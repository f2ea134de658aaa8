"""Launches of the device code: on the host, where each GPU thread is a fibre, or on a GPU.

`run` takes what `megakernel.vm.run` takes and does the same, by the task code that ships.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megakernel import abi, build
from megakernel.config import KV_NORM_EPS
from megakernel.launch import Deadlock, Launch, Result, Worker
from megakernel.memory import Memory
from megakernel.table import Table

SPIN_BUDGET = {"cpu": 2_000_000, "cuda": 100_000_000}
"""Polls without progress after which a launch is given up: seconds on either machine."""

_STATES = abi.ENUMS["State"]


class _Call:
    """The arrays of one launch and the Params that point to them; it keeps them alive."""

    def __init__(self, table: Table, memory: Memory, launch: Launch, budget: int, trace: bool):
        device = memory.work.device
        config = table.graph.config
        self.arrays: dict[str, torch.Tensor] = {
            "weights": memory.weights,
            "cache": memory.cache,
            "work": memory.work,
            "rotary": memory.rotary,
        }
        for name in Table.ARRAYS:
            flat = np.ascontiguousarray(getattr(table, name)).view(np.uint8).reshape(-1)
            # an empty array has no address
            self.arrays[name] = torch.from_numpy(flat if flat.size else np.zeros(4, np.uint8)).to(device)
        tasks, events = len(table.tasks), len(table.thresholds)
        words = dict(counters=events, arrived=tasks, queue_ends=2, abort=1)
        for name, count in words.items():
            self.arrays[name] = torch.zeros(count, dtype=torch.int32, device=device)
        self.arrays["queue"] = torch.zeros(tasks, dtype=torch.int64, device=device)
        self._begin(table)
        self.arrays["forced"] = launch.forced.to(device)
        self.tokens = torch.full((launch.iterations,), -1, dtype=torch.int32, device=device)
        self.arrays["tokens"] = self.tokens
        self.trace = None
        if trace:
            shape = launch.iterations, config.vocab_size
            self.trace = torch.full(shape, torch.nan, dtype=torch.float32, device=device)
            self.arrays["trace"] = self.trace
        self.dump = torch.zeros((table.workers, abi.dtype("Dump").itemsize), dtype=torch.uint8, device=device)
        self.arrays["dump"] = self.dump

        self.params = np.zeros(1, abi.dtype("Params"))
        record = self.params[0]
        for name, tensor in self.arrays.items():
            record[name] = tensor.data_ptr()
        numbers = dict(
            spin_budget=budget,
            seed=launch.seed,
            noise_position=launch.noise_position,
            num_tasks=tasks,
            num_events=events,
            workers=table.workers,
            dynamic=table.dynamic,
            iterations=launch.iterations,
            position=launch.position,
            launch_event=table.launch_event,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            nope=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            v=config.v_head_dim,
            lora=config.kv_lora_rank,
            experts=config.n_routed_experts,
            topk=config.num_experts_per_tok,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
            kv_eps=KV_NORM_EPS,
            softmax_scale=config.softmax_scale,
            routed_scale=config.routed_scaling_factor,
            temperature=launch.temperature,
        )
        for name, number in numbers.items():
            record[name] = number

    def _begin(self, table: Table) -> None:
        """Counts the launch event up, as the host must, and puts what waits for nothing else into the queue."""
        event = table.launch_event
        self.arrays["counters"][event] = 1
        if not table.dynamic:
            return
        first, end = table.consumer_first[event : event + 2]
        ready = []
        for task in table.consumers[first:end].tolist():
            self.arrays["arrived"][task] = 1
            if table.tasks[task]["wait_count"] == 1:
                ready.append(task)
        for at, task in enumerate(ready):
            self.arrays["queue"][at] = task + (1 << 32)
        self.arrays["queue_ends"][1] = len(ready)

    def finish(self, table: Table) -> Result:
        """What the launch returned. Raises Deadlock if it was given up."""
        if self.arrays["abort"].item():
            raise Deadlock(table.graph, self.workers())
        return Result(self.tokens, self.trace)

    def workers(self) -> list[Worker]:
        records = self.dump.cpu().numpy().reshape(-1).view(abi.dtype("Dump"))
        return [
            Worker(
                _STATES[record["state"]],
                *(int(record[name]) for name in ("iteration", "task", "event", "value", "threshold")),
                _STATES[record["producer_state"]],
                int(record["producer_task"]),
            )
            for record in records
        ]


def run(
    table: Table,
    memory: Memory,
    *,
    iterations: int,
    position: int,
    forced: Sequence[int] | torch.Tensor | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    noise_position: int = 0,
    trace: bool = False,
    order_seed: int = 0,
    spin_budget: int | None = None,
    config: build.BuildConfig | None = None,
) -> Result:
    """Decodes tokens in one launch, where the memory is: the host's fibres on a CPU, the kernel on a GPU.

    Args:
        table: of `megakernel.table.pack`.
        memory: of `Memory.of` for this table; its cache grows by `iterations` positions.
        iterations, position, forced, temperature, seed, noise_position: as for `megakernel.launch.Launch.of`.
        trace: whether to return the logits.
        order_seed: stands for one interleaving of the host's fibres.
        spin_budget: polls without progress after which the launch is given up; None is SPIN_BUDGET.
        config: the build to use; None is what `build.configure` says for the table.

    Returns:
        `Result`; its tensors are on the memory's device.

    Raises:
        ValueError: an argument is wrong, or more workers than fit the GPU at the same time.
        Deadlock: the launch was given up; it says what each worker was doing.
        BuildError: the device code can't be compiled here.
    """
    memory.check(table)
    device = memory.work.device
    launch = Launch.of(
        table.graph.config,
        memory.capacity,
        iterations=iterations,
        position=position,
        forced=forced,
        temperature=temperature,
        seed=seed,
        noise_position=noise_position,
        has_token=memory.has_token(),
    )
    target = _target(device)
    library = build.load(config or build.configure(table, target), target)
    call = _Call(table, memory, launch, SPIN_BUDGET[device.type] if spin_budget is None else spin_budget, trace)
    pointer = ctypes.c_void_p(call.params.ctypes.data)
    if target == "host":
        if library.mk_launch(pointer, ctypes.c_uint64(order_seed % 2**64)):
            raise RuntimeError("threads of a block wait for each other at a barrier: a fault of the device code")
        return call.finish(table)
    _launch_on_gpu(library, pointer, table, device)
    return call.finish(table)


def _target(device: torch.device) -> str:
    if device.type == "cpu":
        return "host"
    return "gfx942" if torch.version.hip else "sm_90a"


def _launch_on_gpu(library: ctypes.CDLL, params: ctypes.c_void_p, table: Table, device: torch.device) -> None:
    library.mk_error.restype = ctypes.c_char_p

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"launch of the megakernel failed: {library.mk_error(code).decode()}")

    index = device.index if device.index is not None else torch.cuda.current_device()
    most = ctypes.c_int()
    check(library.mk_most_workers(index, ctypes.byref(most)))
    if table.workers > most.value:
        raise ValueError(
            f"workers: at most {most.value} blocks fit {torch.cuda.get_device_name(index)} at the same time, and a "
            f"launch of {table.workers} would wait for itself"
        )
    stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
    check(library.mk_launch(params, index, stream))
    torch.cuda.synchronize(index)


# ---------------------------------------------------------------------------------------------------- under sanitizers


def run_program(program: Path, table: Table, memory: Memory, launch: Launch, order_seed: int = 0) -> Result:
    """The same on the host, in a process of its own: `build.host_program`, which sanitizers can watch.

    Every array is allocated with its exact size there. The memory is left as it is.

    Raises:
        RuntimeError: the program failed; the message holds what it said, a sanitizer's report for instance.
        Deadlock: as for `run`.
    """
    call = _Call(table, memory, launch, SPIN_BUDGET["cpu"], trace=True)
    pointers = [field.name for field in abi.PARAMS if field.type == "ptr"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launch"
        with open(path, "wb") as file:
            for name in pointers:
                data = call.arrays[name].contiguous().view(torch.uint8).numpy().tobytes()
                file.write(np.int64(len(data)).tobytes() + data)
            file.write(call.params.tobytes())
        done = subprocess.run([str(program), str(path), str(order_seed)], capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{program.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        data = (Path(folder) / "launch.out").read_bytes()
    for name in ("abort", "tokens", "trace", "dump"):
        array = call.arrays[name].view(torch.uint8).reshape(-1)
        array.copy_(torch.frombuffer(bytearray(data[: len(array)]), dtype=torch.uint8))
        data = data[len(array) :]
    return call.finish(table)
