"""Launches of the device code: on the host, where each GPU thread is a fibre, or on a GPU.

`Native` does what `megakernel.vm.Machine` does, with the same arguments and results, by the task code that ships.
"""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fmms.arguments import check_integer
from megakernel import abi, build
from megakernel.config import KV_NORM_EPS
from megakernel.launch import Deadlock, Launch, Result, Worker
from megakernel.memory import Memory
from megakernel.table import Table

SPIN_BUDGET = {"cpu": 2_000_000, "cuda": 10_000_000}
"""Polls without progress after which a launch is given up: seconds on either machine."""

_STATES = abi.ENUMS["State"]
_HOST_FAULTS = {
    1: "threads of a block wait for each other at a barrier",
    2: "a task wrote past the room of x_items",
    3: "a task wrote past the room of slots",
    4: "a task wrote past the room of scratch",
}


class Native:
    """A table and the memory that its tasks work on, ready to be launched where the memory is.

    Args:
        table: of `megakernel.table.pack`.
        memory: of `Memory.of` for this table or another one of its graph.
        config: the build to use; None is what `build.configure` says for the table.

    Raises:
        ValueError: the memory was made for another graph, the build has too little room for the table, or there are
            more workers than can be on the GPU at the same time.
        BuildError: the device code can't be compiled here.
    """

    def __init__(self, table: Table, memory: Memory, config: build.BuildConfig | None = None):
        memory.check(table)
        self.table, self.memory = table, memory
        self.device = memory.work.device
        self.target = "host" if self.device.type == "cpu" else "gfx942" if torch.version.hip else "sm_90a"
        self.config = config or build.configure(table, self.target)
        for name, need in build.room(table, dataclasses.asdict(self.config)).items():
            if getattr(self.config, name) < need:
                raise ValueError(
                    f"config: {name} must be at least {need} for this table, not {getattr(self.config, name)}"
                )
        self.library = build.load(self.config, self.target)
        if self.target != "host":
            self.index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self.library.mk_error.restype = ctypes.c_char_p
            self._check_workers()

        tasks, events = len(table.tasks), len(table.thresholds)
        arrays: dict[str, torch.Tensor] = {
            "weights": memory.weights,
            "cache": memory.cache,
            "work": memory.work,
            "rotary": memory.rotary,
        }
        for name in Table.ARRAYS:
            flat = np.ascontiguousarray(getattr(table, name)).view(np.uint8).reshape(-1)
            # an empty array would have no address
            arrays[name] = torch.from_numpy(flat if flat.size else np.zeros(4, np.uint8)).to(self.device)
        # what must be zero when a launch begins, in one allocation: 8-byte words first
        words = dict(queue=2 * tasks, counters=events, arrived=tasks, queue_ends=2, abort=1)
        self.begin = self._begin(words)
        self.counts = self.begin.clone()
        arrays |= zip(words, self.counts.split(list(words.values())), strict=True)
        self.dump = torch.zeros((table.workers, abi.dtype("Dump").itemsize), dtype=torch.uint8, device=self.device)
        self.arrays = arrays | {"dump": self.dump}

    def _check_workers(self) -> None:
        most = ctypes.c_int()
        with torch.cuda.device(self.index):
            self._check(self.library.mk_most_workers(self.index, ctypes.byref(most)))
        if self.table.workers > most.value:
            raise ValueError(
                f"workers: at most {most.value} blocks fit {torch.cuda.get_device_name(self.index)} at the same time, "
                f"and a launch of {self.table.workers} would wait for itself"
            )

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"launch of the megakernel failed: {self.library.mk_error(code).decode()}")

    def _begin(self, words: dict[str, int]) -> torch.Tensor:
        """The counts when a launch begins: the launch event is counted up, and what waits for nothing else is ready."""
        table, event = self.table, self.table.launch_event
        counts = {name: np.zeros(count, np.int32) for name, count in words.items()}
        counts["counters"][event] = 1
        if table.dynamic:
            first, end = table.consumer_first[event : event + 2]
            waiting = table.consumers[first:end]
            counts["arrived"][waiting] = 1
            ready = waiting[table.tasks["wait_count"][waiting] == 1]
            counts["queue"].view(np.int64)[: len(ready)] = ready.astype(np.int64) + (1 << 32)
            counts["queue_ends"][1] = len(ready)
        return torch.from_numpy(np.concatenate(list(counts.values()))).to(self.device)

    def params(self, launch: Launch, spin_budget: int | None, results: dict[str, torch.Tensor]) -> np.ndarray:
        """A Params record that points to these arrays."""
        table, config = self.table, self.table.graph.config
        record = np.zeros(1, abi.dtype("Params"))
        for name, tensor in (self.arrays | results).items():
            record[0][name] = tensor.data_ptr()
        numbers = dict(
            spin_budget=SPIN_BUDGET[self.device.type] if spin_budget is None else spin_budget,
            seed=launch.seed,
            noise_position=launch.noise_position,
            num_tasks=len(table.tasks),
            num_events=len(table.thresholds),
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
            record[0][name] = number
        return record

    def results(self, launch: Launch, trace: bool, timeline: bool = False) -> dict[str, torch.Tensor]:
        """Arrays that a launch fills, and what it is forced to read."""
        arrays = dict(
            forced=launch.forced.to(self.device),
            tokens=torch.full((launch.iterations,), -1, dtype=torch.int32, device=self.device),
            times=torch.zeros(launch.iterations, dtype=torch.int64, device=self.device),
        )
        if trace:
            shape = launch.iterations, self.table.graph.config.vocab_size
            arrays["trace"] = torch.full(shape, torch.nan, dtype=torch.float32, device=self.device)
        if timeline:
            shape = len(self.table.tasks), len(abi.TIMELINE)
            arrays["timeline"] = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return arrays

    def check(self, **launch) -> Launch:
        """`Launch.of` with what this memory and table allow."""
        settings = dict(forced=None, temperature=0.0, seed=0, noise_position=0) | launch
        has_token = self.memory.has_token()
        # the tickets of a ready queue are numbers of 32 bits
        most = (
            min(abi.MOST_ITERATIONS, (2**32 - 1) // len(self.table.tasks))
            if self.table.dynamic
            else abi.MOST_ITERATIONS
        )
        return Launch.of(self.table.graph.config, self.memory.capacity, has_token=has_token, most=most, **settings)

    def run(
        self,
        *,
        iterations: int,
        position: int,
        forced: Sequence[int] | torch.Tensor | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        noise_position: int = 0,
        trace: bool = False,
        timeline: bool = False,
        order_seed: int = 0,
        spin_budget: int | None = None,
    ) -> Result:
        """Decodes tokens in one launch, and waits for it.

        Args:
            iterations, position, forced, temperature, seed, noise_position: as for `megakernel.launch.Launch.of`; the
                cache grows by `iterations` positions.
            trace: whether to return the logits.
            timeline: whether to return when each task of the last token ran; the clock costs some time.
            order_seed: stands for one interleaving of the host's fibres.
            spin_budget: polls without progress after which the launch is given up; None is SPIN_BUDGET.

        Returns:
            `Result`; its tensors are on the memory's device.

        Raises:
            ValueError: an argument is wrong; the message names it.
            Deadlock: the launch was given up; it says what each worker was doing.
        """
        if spin_budget is not None:
            spin_budget = check_integer("spin_budget", spin_budget, 0, 2**63 - 1, "a number of polls")
        order_seed = check_integer("order_seed", order_seed, 0, 2**64 - 1, "an integer from 0 to 2**64 - 1")
        launch = self.check(
            iterations=iterations,
            position=position,
            forced=forced,
            temperature=temperature,
            seed=seed,
            noise_position=noise_position,
        )
        results = self.results(launch, trace, timeline)
        self.memory.begin()
        self.counts.copy_(self.begin)
        params = self.params(launch, spin_budget, results)
        pointer = ctypes.c_void_p(params.ctypes.data)
        if self.target == "host":
            if fault := self.library.mk_launch(pointer, ctypes.c_uint64(order_seed)):
                raise RuntimeError(f"{_HOST_FAULTS[fault]}: a fault of the device code or of build.configure")
        else:
            stream = torch.cuda.current_stream(self.index)
            with torch.cuda.device(self.index):
                self._check(self.library.mk_launch(pointer, self.index, ctypes.c_void_p(stream.cuda_stream)))
            stream.synchronize()
        return self.finish(results)

    def finish(self, results: dict[str, torch.Tensor]) -> Result:
        """What a launch returned. Raises Deadlock if it was given up."""
        if self.arrays["abort"].item():
            raise Deadlock(self.table.graph, self.workers())
        return Result(results["tokens"], results.get("trace"), results["times"], results.get("timeline"))

    def workers(self) -> list[Worker]:
        """What each worker was doing when a launch was given up."""
        return [
            Worker(
                _STATES[record["state"]],
                *(int(record[name]) for name in ("iteration", "task", "event", "value", "threshold")),
                _STATES[record["producer_state"]],
                int(record["producer_task"]),
            )
            for record in self.dump.cpu().numpy().reshape(-1).view(abi.dtype("Dump"))
        ]


def run(table: Table, memory: Memory, config: build.BuildConfig | None = None, **launch) -> Result:
    """One launch of a table; arguments, results and errors are those of `Native` and `Native.run`."""
    return Native(table, memory, config).run(**launch)


# ---------------------------------------------------------------------------------------------------- under sanitizers


def run_program(program: Path, native: Native, order_seed: int = 0, **launch) -> Result:
    """A launch on the host in a process of its own: of `build.host_program`, which sanitizers can watch.

    Every array is an allocation of its own there, of exactly its size. What the launch computes stays there.

    Args:
        launch: as for `Native.run`, without `spin_budget`.

    Raises:
        RuntimeError: the program failed; the message holds what it said, a sanitizer's report for instance.
        Deadlock: as for `Native.run`.
    """
    checked = native.check(**launch)
    results = native.results(checked, trace=True, timeline=True)
    native.memory.begin()
    native.counts.copy_(native.begin)
    arrays = native.arrays | results
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launch"
        with open(path, "wb") as file:
            for field in abi.PARAMS:
                if field.type == "ptr":
                    data = arrays[field.name].contiguous().view(torch.uint8).numpy().tobytes()
                    file.write(np.int64(len(data)).tobytes() + data)
            file.write(native.params(checked, None, results).tobytes())
        done = subprocess.run([str(program), str(path), str(order_seed)], capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{program.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        data = bytearray(path.with_name("launch.out").read_bytes())
    for name in ("abort", "tokens", "times", "trace", "dump"):
        array = arrays[name].view(torch.uint8).reshape(-1)
        array.copy_(torch.frombuffer(data[: len(array)], dtype=torch.uint8))
        data = data[len(array) :]
    return native.finish(results)
