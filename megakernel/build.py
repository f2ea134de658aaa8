"""Builds the device source: for the host, where each GPU thread is a fibre, for NVIDIA and for AMD.

A build is known by a hash of the sources, of its configuration, of the options and of the architecture, and is made
once: later processes load it from the cache (`cache_folder`). The host's is made by the C++ compiler, the GPUs' by
`torch.utils.cpp_extension`. All have plain C functions, called through ctypes, so none of torch's headers are compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from megakernel import abi
from megakernel.table import Table

CSRC = Path(__file__).parent / "csrc"
TARGETS = ("host", "sm_90a", "gfx942")


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """What is fixed when the device source is compiled: the shape of a block and the sizes of its shared memory."""

    consumer_waves: int
    """Waves that compute, a power of two for each team; one more fetches weights."""
    teams: int
    """Groups of waves that take turns with the pieces in the ring; a divisor of consumer_waves and of stages."""
    stages: int
    """Pieces of weights that the ring has room for."""
    in_flight: int
    """Pieces that may be on their way from memory at once, where copies are asynchronous."""
    stage_bytes: int
    """Of a piece; a multiple of 128."""
    x_items: int
    """bf16 values of the longest input of a matrix product, or of an attention task's queries."""
    slots: int
    """fp32 sums that the rows of a task leave."""
    scratch: int
    """fp32 words for the scores of attention, the factors of a merge and the router's probabilities."""
    wave: int = 32
    """Threads of a wave; a GPU has its own."""
    every_thread: bool = False
    """Every thread arrives at gates and waits there for itself, instead of one for its wave, and the producer's lanes
    begin their copies one after another. That is slower, but compute-sanitizer's racecheck knows of no other order."""

    def __post_init__(self):
        """Raises ValueError for a shape that the device code can't have; the message names the field."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be True or False, not {value!r}")
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be a positive integer, not {value!r}")
        each, left = divmod(self.consumer_waves, self.teams)
        if left or each & (each - 1):
            raise ValueError(
                f"consumer_waves must be teams = {self.teams} times a power of two, not {self.consumer_waves}"
            )
        if self.stages % self.teams:
            raise ValueError(f"stages must be a multiple of teams = {self.teams}, not {self.stages}")
        if not self.in_flight <= self.stages:
            raise ValueError(f"in_flight must be at most stages = {self.stages}, not {self.in_flight}")
        if self.stage_bytes % 128:
            raise ValueError(f"stage_bytes must be a multiple of 128, not {self.stage_bytes}")
        if self.wave not in (32, 64):
            raise ValueError(f"wave must be 32 or 64, not {self.wave}")

    def header(self) -> str:
        """The text of build_config.h."""
        names = dict(consumer_waves="CONSUMER_WAVES", wave="HOST_WAVE")
        lines = [
            f"constexpr int {names.get(field.name, field.name.upper())} = {int(getattr(self, field.name))};"
            for field in dataclasses.fields(self)
        ]
        return "#pragma once\n\nnamespace mk {\n\n" + "\n".join(lines) + "\n\n}  // namespace mk\n"


SHAPES = {
    # small stages, so that the tiny model has rows of several pieces and pieces of several rows
    "host": dict(consumer_waves=2, teams=2, stages=4, in_flight=3, stage_bytes=1024),
    # 192 KB of ring, which ran ahead furthest in measurements of streaming; a wave for each piece, three rows of 4 KB
    "sm_90a": dict(consumer_waves=8, teams=8, stages=16, in_flight=4, stage_bytes=12 * 1024),
    "gfx942": dict(consumer_waves=4, teams=2, stages=4, in_flight=4, stage_bytes=8 * 1024, wave=64),
}
"""What blocks look like on each target, unless a caller says otherwise."""

ROOM = ("x_items", "slots", "scratch")
"""Fields of BuildConfig that say how much a task may put into shared memory."""

FLOORS = {"host": dict(x_items=4096, slots=4096, scratch=4096)}
"""Room that a build has at least, so that the many small tables of tests share builds."""


def parts_of_row(rows: int, cols: int, shape: Mapping[str, int]) -> int:
    """Sums that a row of so many columns leaves, in a task of so many rows; csrc/stream.h does the same."""
    items = shape["stage_bytes"] // 2
    waves = shape["consumer_waves"] // shape["teams"]
    pieces = -(-cols // items)
    most = max(1, items // cols)
    at_once = min(most, max(-(-rows // shape["teams"]), min(waves, most)))
    return pieces * (waves if at_once < waves else 1)


def configure(table: Table, target: str = "host", **shape: int) -> BuildConfig:
    """The build that can run a table.

    Args:
        target: one of TARGETS.
        shape: fields of BuildConfig to set; others are those of SHAPES, or what the table needs.

    Raises:
        ValueError: the target or a field is unknown.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, not {target!r}")
    unknown = shape.keys() - {field.name for field in dataclasses.fields(BuildConfig)}
    if unknown:
        raise ValueError(f"{min(unknown)} is no field of a build")
    floors = FLOORS.get(target, {})
    shape = SHAPES[target] | shape
    BuildConfig(**(dict.fromkeys(ROOM, 8) | shape))  # before anything is divided by it
    needs = {name: max(need, floors.get(name, 0)) for name, need in room(table, shape).items()}
    return BuildConfig(**(needs | shape))


def room(table: Table, shape: Mapping[str, int]) -> dict[str, int]:
    """The least x_items, slots and scratch with which a table can run.

    Args:
        shape: consumer_waves, teams, stage_bytes and wave of the build.
    """
    config = table.graph.config
    x_items = config.kv_lora_rank + config.qk_rope_head_dim
    # each wave has the routing, and the scores that it is made from
    waves = shape["consumer_waves"]
    slots, scratch = max(64, 4 * waves * config.num_experts_per_tok), waves * config.n_routed_experts
    products = [abi.code(name) for name in ("gemv", "gemv_res", "gemv_silu", "gemv_splitk", "moe_gate_topk")]
    kinds = np.unique(
        np.stack([table.tasks["code"], table.tasks["args"], *table.tasks["rows"].T, *table.tasks["chunk"].T]), axis=1
    )
    for code, number, first, end, left, right in kinds.T.tolist():
        args = table.args[number]
        if code in products:
            cols = right - left if code == abi.code("gemv_splitk") else int(args["cols"])
            heads = 1
            if args["head_rows"]:
                heads = (end - 1) // int(args["head_rows"]) - first // int(args["head_rows"]) + 1
            rows = config.n_routed_experts if code == abi.code("moe_gate_topk") else end - first
            rows *= 2 if code == abi.code("gemv_silu") else 1
            x_items = max(x_items, heads * cols)
            slots = max(slots, rows * parts_of_row(rows, cols, shape))
            if args["input_kind"] == abi.value("Input", "merge"):
                heads = heads if args["head_rows"] else cols // int(args["head_stride"])
                scratch = max(scratch, _factors(heads, int(args["chunks"]), waves))
                x_items = max(x_items, heads * int(args["head_stride"]))
        elif code == abi.code("attn_chunk"):
            heads = (end - first) // int(args["head_stride"])
            main = config.qk_nope_head_dim if args["absorbed"] < 0 else config.kv_lora_rank
            length = main + config.qk_rope_head_dim
            # queries, and the row of this position
            x_items = max(x_items, (heads + 1) * length)
            # scores, and two pointers for each position
            scratch = max(scratch, (heads + 4) * (right - left))
        elif code == abi.code("attn_merge"):
            heads = (end - first) // int(args["head_stride"])
            scratch = max(scratch, _factors(heads, int(args["chunks"]), waves))
            x_items = max(x_items, end - first)
        elif code == abi.code("rms_norm"):
            x_items = max(x_items, int(args["cols"]))
    # whole vectors of 16 bytes
    return {name: -(-need // 8) * 8 for name, need in zip(ROOM, (x_items, slots, scratch), strict=True)}


def _factors(heads: int, chunks: int, waves: int) -> int:
    """Words for the factors of a merge; csrc/merge.h has them for each wave apart, or for all together."""
    return chunks * (waves if heads == 1 and chunks <= abi.ALONE_CHUNKS else heads)


# --------------------------------------------------------------------------------------------------------------- cache


def cache_folder() -> Path:
    """Where builds are kept: $MEGAKERNEL_CACHE, or megakernel in the user's cache folder."""
    if folder := os.environ.get("MEGAKERNEL_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel"


def digest(config: BuildConfig, target: str, options: Sequence[str] = ()) -> str:
    """The hash by which a build is known."""
    text = hashlib.sha256()
    for path in sorted(CSRC.rglob("*")):
        if path.is_file():
            text.update(f"{path.relative_to(CSRC)}\0".encode() + path.read_bytes() + b"\0")
    text.update("\0".join([config.header(), target, *options]).encode())
    return text.hexdigest()[:20]


def write_config(config: BuildConfig, folder: Path) -> None:
    """Writes build_config.h into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build_config.h").write_text(config.header(), encoding="utf-8")


def compile_options(config: BuildConfig, target: str, folder: Path) -> list[str]:
    """Options that compile csrc/kernel.cu (or, for "host", csrc/host.cpp) with any compiler of the target.

    Args:
        folder: gets build_config.h.
    """
    write_config(config, folder)
    options = ["-std=c++17", "-O3" if target != "host" else "-O2", f"-I{CSRC}", f"-I{folder}"]
    return [*options, "-DMK_HOST"] if target == "host" else options


class BuildError(RuntimeError):
    """A compiler is missing or refused the source; the message holds what it said."""


def host_library(config: BuildConfig) -> Path:
    """The shared library of the host's build, made unless the cache has it.

    Raises:
        BuildError: there is no C++ compiler ($CXX, or g++), or it fails.
    """
    return _host("library.so", config, ["-fPIC", "-shared"], [CSRC / "host.cpp"])


def host_program(config: BuildConfig, sanitizers: str = "address,undefined") -> Path:
    """A program that runs launches written to a file (`megakernel.native.save`) under sanitizers.

    Raises:
        BuildError: as for `host_library`.
    """
    options = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g1"] if sanitizers else []
    return _host("program", config, options, [CSRC / "host.cpp", CSRC / "host_main.cpp"])


def _host(name: str, config: BuildConfig, more: Sequence[str], sources: Sequence[Path]) -> Path:
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    options = ["-Wall", "-Wextra", *more]
    folder = cache_folder() / f"host-{digest(config, 'host', [platform.machine(), *compiler, *options])}"
    output = folder / name
    if output.is_file():
        return output
    if not shutil.which(compiler[0]):
        raise BuildError(f"no C++ compiler {compiler[0]}; install g++, or name another one in CXX")
    # made aside and moved, so that a killed or a second process never leaves half a build under the name
    with _aside(folder) as aside:
        command = [*compiler, *compile_options(config, "host", aside), *options, *map(str, sources)]
        done = subprocess.run([*command, "-o", str(aside / name)], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{' '.join(command)}\n{done.stderr}")
        os.replace(aside / name, output)
    return output


@contextlib.contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A temporary folder in a folder of the cache. Raises BuildError if it can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        raise BuildError(
            f"builds can't be kept in {folder}: {error}; name another folder in MEGAKERNEL_CACHE"
        ) from error
    with temporary as name:
        yield Path(name)


def load(config: BuildConfig, target: str = "host") -> ctypes.CDLL:
    """A build as a library, made unless the cache has it, after its records were compared with those of `abi`.

    Raises:
        BuildError: a compiler is missing or fails.
        RuntimeError: the build lays its records out differently than Python does.
    """
    make = host_library if target == "host" else functools.partial(_gpu_library, target=target)
    path = make(config)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # a damaged file; one that has just been made is not
        path.unlink()
        library = ctypes.CDLL(str(make(config)))
    expected = abi.layout()
    numbers = (ctypes.c_int32 * (len(expected) + 1))()
    count = library.mk_layout(numbers, len(numbers))
    if list(numbers)[:count] != expected:
        raise RuntimeError(f"the {target} build and megakernel/abi.py disagree about their records: rebuild it")
    return library


def _gpu_library(config: BuildConfig, target: str) -> Path:
    """csrc/kernel.cu, compiled by torch.utils.cpp_extension; a ROCm build of torch hipifies it first."""
    import torch
    from torch.utils import cpp_extension

    home, tool = (cpp_extension.ROCM_HOME, "ROCm") if torch.version.hip else (cpp_extension.CUDA_HOME, "CUDA toolkit")
    if not home:
        version = torch.version.hip or torch.version.cuda
        raise BuildError(
            f"no {tool}: install that of this PyTorch ({version or 'a build for CPUs'}) and set "
            f"{'ROCM_HOME' if torch.version.hip else 'CUDA_HOME'} to where it is"
        )
    if not cpp_extension.is_ninja_available():
        raise BuildError("no ninja, which torch.utils.cpp_extension builds with: pip install 'fmms[megakernel]'")
    options = ["-O3"]
    if target == "sm_90a":
        options.append("-gencode=arch=compute_90a,code=sm_90a")
    known_by = digest(config, target, [*options, torch.__version__])
    folder = cache_folder() / f"{target}-{known_by}"
    library = folder / "megakernel.so"
    if library.is_file():
        return library
    # aside: hipify writes beside the sources, and a build that is killed leaves a lock that the next one would wait for
    with _aside(folder) as aside:
        write_config(config, aside)
        shutil.copytree(CSRC, aside / "csrc")
        try:
            cpp_extension.load(
                f"megakernel_{known_by}",
                [str(aside / "csrc" / "kernel.cu")],
                extra_cuda_cflags=options,
                extra_include_paths=[str(aside / "csrc"), str(aside)],
                build_directory=str(aside),
                is_python_module=False,
                with_cuda=True,
            )
        except (RuntimeError, OSError) as error:
            raise BuildError(str(error)) from error
        os.replace(aside / f"megakernel_{known_by}.so", library)
    return library
