"""Compiles the megakernel for GPUs that need not be there: `python -m megakernel.compile_check [--target TARGET ...]`.

Proves that the device source compiles and shows what each kernel takes (registers, spills, shared memory), not that it
runs. Exit status: 0 when all is within limits; 1 when a compile fails or a limit is exceeded; 2 when the command line
is wrong or there is no source; 3 when a tool is missing and nothing failed before. With `--json` one object per kernel,
or per failure, on standard output; messages always go to standard error.

    gfx942          clang's HIP for AMD's MI300, against Debian's HIP 5.2 headers
    gfx942-hipify   what torch.utils.cpp_extension does on a ROCm build: hipify, then clang with torch's options,
                    against the HIP headers that Triton ships (7.x), or Debian's without Triton
    sm_90a          nvcc for NVIDIA's H100 and H200
"""

import argparse
import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

FAILED, MISSING = 1, 3
CLANG = "19"
DEBIAN_PACKAGES = (f"clang-{CLANG}", f"lld-{CLANG}", f"llvm-{CLANG}", "libamdhip64-dev", "rocm-device-libs")
"""What clang needs to compile HIP for AMD; all of them are in Debian 12 (86 MB). Beside them: g++."""
NVCC_WHEELS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
"""nvcc with the headers of device code, from PyPI: one CUDA release. Later parts do not fit an earlier nvcc."""

_SYSTEM = Path("/usr")
"""Where Debian's packages lie."""


class ToolMissing(Exception):
    """A compiler or library for a target isn't installed; the message says how to install it."""


class CompileFailed(Exception):
    """A compiler refused the source, or its output could not be read; the message is the compiler's."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, and what a kernel may take on it."""

    arch: str
    shared_limit: int
    """Bytes of shared memory (LDS) that one block can have, static and dynamic together."""
    shared: str
    """The figure that `shared_limit` holds for."""
    budget: dict[str, int]
    """Most that a figure may be, for every kernel."""
    columns: tuple[str, ...]
    """Figures, in the order of the table."""


_AMD_FIGURES = {
    ".vgpr_count": "vgprs",  # per lane; with the AGPRs, which share one file of 512 with them on gfx942
    ".sgpr_count": "sgprs",  # per wave
    ".agpr_count": "agprs",
    ".vgpr_spill_count": "vgpr_spills",
    ".sgpr_spill_count": "sgpr_spills",
    ".private_segment_fixed_size": "scratch_bytes",  # per lane
    ".group_segment_fixed_size": "lds_bytes",  # per block
    ".uses_dynamic_stack": "dynamic_stack",
}
# The megakernel is one loop that every weight passes through, so a spill to memory is paid per task: none is allowed.
# SGPRs are spilled to lanes of VGPRs, an instruction each way and no memory; there are 173, for the many addresses that
# the kernel keeps. Scratch shows spills of functions that were not inlined, which are in no count: beyond
# 512 bytes, the heap of 64 doubles from which one thread draws once a token, and 16, two addresses in an array. A
# dynamic stack is one whose size the compiler can't tell.
_AMD_BUDGET = {"vgpr_spills": 0, "sgpr_spills": 256, "scratch_bytes": 528, "dynamic_stack": 0}
_NVIDIA_FIGURES = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "shared_bytes")
# As above. Not the stack: functions that were not inlined get rows of their own, with their spills.
_NVIDIA_BUDGET = {"spill_store_bytes": 0, "spill_load_bytes": 0}

_GFX942 = Target("gfx942", 64 * 1024, "lds_bytes", _AMD_BUDGET, tuple(_AMD_FIGURES.values()))
TARGETS = {
    "gfx942": _GFX942,
    "gfx942-hipify": _GFX942,
    "sm_90a": Target("sm_90a", 227 * 1024, "shared_bytes", _NVIDIA_BUDGET, _NVIDIA_FIGURES),
}
PRESETS = {"gfx942": ("mi300x",), "gfx942-hipify": ("mi300x",), "sm_90a": ("h200",)}
"""Of megakernel.knobs: those made for the target. Others differ in sizes of arrays only."""
AT_LAUNCH = "compile_check_at_launch"


@dataclasses.dataclass(frozen=True)
class Unit:
    """One compilation: a device source with its options."""

    name: str
    source: Path
    options: tuple[str, ...] = ()
    """A device variable AT_LAUNCH, of one byte more than the shared memory that a launch adds, makes that known."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one kernel takes."""

    kernel: str
    figures: dict[str, int]
    """By name, see Target.columns: registers per thread (sgprs per wave), spills in registers (AMD) or bytes (NVIDIA)
    per thread, stack or scratch bytes per thread, shared bytes per block."""
    entry: bool = True
    """False for a function that was not inlined into the kernels that call it."""


def sources_and_options(target: str, build_dir: Path) -> list[Unit]:
    """What is compiled for a target of TARGETS by default: the megakernel as each of its PRESETS needs it.

    Writes generated headers into `build_dir`. Raises FileNotFoundError when there is no device source.
    """
    # here, since another source needs none of it
    from megakernel import build, graph, knobs, table
    from megakernel.config import V2_LITE

    source = build.CSRC / "kernel.cu"
    if not source.is_file():
        raise FileNotFoundError(f"there is no device source {source}; name one with --source")
    units = []
    for preset in PRESETS[target]:
        folder = build_dir / "config" / f"{target}-{preset}"
        arch = TARGETS[target].arch
        config = build.configure(table.pack(graph.build(V2_LITE, knobs.PRESETS[preset])), arch)
        options = build.compile_options(config, arch, folder)
        if target == "gfx942-hipify":  # torch sets the standard; and the headers' names are others after hipify
            options = [option for option in options if not option.startswith("-std")]
        else:
            header = folder / "at_launch.h"
            header.write_text(
                f'#include "shared.h"\n__device__ __attribute__((used)) char {AT_LAUNCH}[MK_SHARED_AT_LAUNCH + 1];\n'
            )
            options += ["-include", str(header)]
        units.append(Unit(preset, source, tuple(options)))
    return units


# ------------------------------------------------------------------------------------------------------ reading objects


def parse_amd_notes(text: str) -> list[Usage]:
    """Kernels in the output of `llvm-readelf --notes` for an AMD code object, in its order.

    Raises CompileFailed when a kernel lacks a figure: then the format is not the known one.
    """
    found: list[dict[str, str]] = []
    for line in text.splitlines():
        # a kernel's own fields are indented by four, its arguments' further
        match = re.match(r"(?:    |  (- ))(\.\w+): +(\S+)$", line)
        if line.startswith("  - "):
            found.append({})
        if match and found:
            found[-1][match[2]] = match[3].strip("'\"")
    usages = []
    for kernel in found:
        if ".vgpr_count" not in kernel:  # an entry of the version
            continue
        lacking = [field for field in (".name", *_AMD_FIGURES) if field not in kernel]
        if lacking:
            raise CompileFailed(f"the notes of kernel {kernel.get('.name')} lack {', '.join(lacking)}")
        words = {"true": 1, "false": 0}
        figures = {
            name: words[kernel[key]] if kernel[key] in words else int(kernel[key]) for key, name in _AMD_FIGURES.items()
        }
        usages.append(Usage(kernel[".name"], figures))
    return usages


def parse_ptxas(text: str) -> list[Usage]:
    """Kernels, then functions that were not inlined, in the output of `nvcc -Xptxas -v`.

    Raises CompileFailed when a kernel lacks its registers or spills: then the format is not the known one.
    """
    figures: dict[str, dict[str, int]] = {}
    entries = []
    name = entry = None
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for", line):
            name = entry = match[1]
            entries.append(name)
            figures.setdefault(name, {})
        elif match := re.search(r"Function properties for '?([^\s']+)'?", line):
            name = match[1]
            figures.setdefault(name, {})
        elif (
            match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        ) and name:
            stack, stores, loads = map(int, match.groups())
            figures[name] |= {"spill_store_bytes": stores, "spill_load_bytes": loads, "stack_bytes": stack}
        elif (match := re.search(r"Used (\d+) registers", line)) and entry:
            shared = re.search(r"(\d+) bytes smem", line)
            figures[entry] |= {"registers": int(match[1]), "shared_bytes": int(shared[1]) if shared else 0}
    for kernel in entries:
        lacking = [figure for figure in _NVIDIA_FIGURES if figure not in figures[kernel]]
        if lacking:
            raise CompileFailed(f"ptxas said nothing of {', '.join(lacking)} for kernel {kernel}")
    functions = [Usage(name, of, entry=False) for name, of in figures.items() if name not in entries]
    return [Usage(name, figures[name]) for name in entries] + functions


def parse_at_launch(text: str) -> int:
    """Bytes of shared memory that a launch adds, from an object's symbols (`readelf -sW`); 0 when none says so."""
    match = re.search(rf"(\w+) +OBJECT +.* {AT_LAUNCH}$", text, re.MULTILINE)
    return int(match[1], 0) - 1 if match else 0


def parse_errors(text: str) -> str:
    """What matters in a compiler's output: errors and what follows them, shared memory in decimal with the excess."""
    if match := re.search(r"local memory \((\d+)\) exceeds limit \((\d+)\) in '(\S+)'", text):
        used, limit, kernel = int(match[1]), int(match[2]), match[3]
    elif match := re.search(r"'(\S+)' uses too much shared data \(0x(\w+) bytes, 0x(\w+) max\)", text):
        kernel, used, limit = match[1], int(match[2], 16), int(match[3], 16)
    else:
        lines = text.splitlines()
        first = next((i for i, line in enumerate(lines) if "error" in line or "fatal" in line), 0)
        return "\n".join(lines[first : first + 40]) or "the compiler failed without a message"
    return f"kernel {kernel}: {used} bytes of shared memory, {used - limit} over the limit of {limit}"


def over_limits(usage: Usage, target: Target) -> list[str]:
    """What a kernel takes beyond the target's shared memory and budget: which figure, and by how much."""
    limits = {target.shared: (target.shared_limit, "limit")}
    limits |= {name: (most, "budget") for name, most in target.budget.items()}
    return [
        f"{name} {usage.figures[name]}, {usage.figures[name] - most} over the {kind} of {most}"
        for name, (most, kind) in limits.items()
        if usage.figures.get(name, 0) > most
    ]


# ------------------------------------------------------------------------------------------------------------ compilers


def _run(command: Sequence[str | Path]) -> str:
    """Both outputs of a command together; CompileFailed with the errors in them when it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    text = done.stdout + done.stderr
    if done.returncode:
        raise CompileFailed(parse_errors(text))
    return text


def _defaults(options: Iterable[str], defaults: Iterable[str]) -> list[str]:
    """The defaults whose kind (-O, -std) isn't among the options: nvcc warns when it finds two."""
    return [new for new in defaults if not any(given.startswith(re.match(r"-O|-\w+=?", new)[0]) for given in options)]


def _tool(name: str, lacking: list[str]) -> Path:
    found = shutil.which(name)
    if not found:
        lacking.append(name)
    return Path(found or name)


def amd_tools(build_dir: Path) -> tuple[Path, Path, Path]:
    """clang++ and llvm-readelf, and a folder with AMD's device libraries that has control bitcode for gfx942.

    Debian's libraries have it for gfx940 only, which has the same instruction set; the folder, made in `build_dir`,
    links to them and gives that one file its second name. Raises ToolMissing.
    """
    lacking: list[str] = []
    clang, readelf = _tool(f"clang++-{CLANG}", lacking), _tool(f"llvm-readelf-{CLANG}", lacking)
    _tool(f"ld.lld-{CLANG}", lacking)
    header = _SYSTEM / "include/hip/hip_runtime.h"
    if not header.is_file():
        lacking.append(str(header))
    # /usr/lib/x86_64-linux-gnu, or another machine's
    libraries = next(iter(sorted(_SYSTEM.glob("lib/*/amdgcn/bitcode"))), None)
    if not libraries:
        lacking.append(f"{_SYSTEM}/lib/*/amdgcn/bitcode")
    if lacking:
        packages = " ".join(DEBIAN_PACKAGES)
        raise ToolMissing(
            f"missing: {', '.join(lacking)}; on Debian 12: apt-get install --no-install-recommends {packages} g++"
        )
    folder = build_dir / "bitcode"
    folder.mkdir(parents=True, exist_ok=True)
    links = {file.name: file for file in libraries.glob("*.bc")}
    links.setdefault("oclc_isa_version_942.bc", libraries / "oclc_isa_version_940.bc")
    for name, file in links.items():
        link = folder / name
        if not link.exists():
            link.unlink(missing_ok=True)  # it may point to what an earlier package had
            with contextlib.suppress(FileExistsError):  # made by another process meanwhile
                link.symlink_to(file)
    return clang, readelf, folder


def hip_headers() -> Path | None:
    """The HIP headers in Triton's wheel, which are those of a current ROCm; None without them."""
    triton = find_spec("triton")
    for place in (triton.submodule_search_locations or ()) if triton else ():
        folder = Path(place) / "backends/amd/include"
        if (folder / "hip/hip_runtime.h").is_file():
            return folder
    return None


# As in torch.utils.cpp_extension.load on a ROCm build. A process of its own: hipify keeps results by file name, and
# writes messages to both outputs.
_HIPIFY = """
import json, os, sys
import torch
from torch.utils import cpp_extension
from torch.utils.hipify import hipify_python
folder, source = sys.argv[1:]
found = hipify_python.hipify(
    project_directory=folder, output_directory=folder, header_include_dirs=[folder], extra_files=[source],
    ignores=[os.path.join(os.path.dirname(torch.__file__), "*")], show_progress=False, is_pytorch_extension=True,
)
options = ["-DWITH_HIP", *cpp_extension.COMMON_HIP_FLAGS, *cpp_extension.COMMON_HIPCC_FLAGS, "-std=c++20"]
print("\\n" + json.dumps([found[source].hipified_path or source, options]))
"""


def hipify(unit: Unit, folder: Path) -> Unit:
    """The unit as torch's extensions have it on a ROCm build: the source's folder copied to `folder`, what the source
    includes from there translated from CUDA to HIP, and torch's options in front of its own.

    `folder` is made anew. Raises ToolMissing without torch; CompileFailed when hipify fails, or when a name that it
    gives to a translation is one of the source's own files: it takes `cuda` in names to `hip`, and asks nobody.
    """
    if find_spec("torch") is None:
        raise ToolMissing("missing: torch, for its hipify; pip install torch (a build for CPUs does)")
    source = unit.source.resolve()
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source.parent, folder)
    text = _run([sys.executable, "-c", _HIPIFY, folder, folder / source.name])
    answers = [line for line in text.splitlines() if line.startswith("[")]
    if not answers:
        raise CompileFailed(f"hipify gave no result:\n{text[-2000:]}")
    originals = [file.relative_to(source.parent) for file in source.parent.rglob("*") if file.is_file()]
    overwritten = [
        str(name) for name in originals if (folder / name).read_bytes() != (source.parent / name).read_bytes()
    ]
    if overwritten:
        names = ", ".join(sorted(overwritten))
        raise CompileFailed(f"hipify overwrites {names} with the translation of another file: rename one of them")
    hipified, options = json.loads(answers[-1])
    own = [option.replace(str(unit.source.parent), str(folder)) for option in unit.options]
    return dataclasses.replace(unit, source=Path(hipified), options=(*options, *own))


def find_nvcc(build_dir: Path) -> Path:
    """nvcc: the system's, else what `fetch_nvcc` put into `build_dir`. Raises ToolMissing."""
    fetched = build_dir / "cuda/nvidia/cu13/bin/nvcc"
    found = shutil.which("nvcc") or (fetched if fetched.is_file() else None)
    if not found:
        raise ToolMissing(
            "missing: nvcc; python -m megakernel.compile_check --fetch-nvcc installs it from PyPI into "
            f"{build_dir}; it also needs a C++ compiler, on Debian: apt-get install g++"
        )
    lacking: list[str] = []
    _tool("g++", lacking)
    _tool("readelf", lacking)
    if lacking:
        raise ToolMissing(f"missing: {', '.join(lacking)}, beside nvcc; on Debian: apt-get install g++ binutils")
    return Path(found)


def fetch_nvcc(build_dir: Path) -> Path:
    """nvcc as `find_nvcc` has it, after installing NVCC_WHEELS (270 MB) into `build_dir` when there is none.

    A folder apart from the Python environment, where a CUDA build of torch has other versions of the same wheels.
    Raises ToolMissing when pip fails.
    """
    with contextlib.suppress(ToolMissing):
        return find_nvcc(build_dir)
    target, partial = build_dir / "cuda", build_dir / "cuda.partial"
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial), *NVCC_WHEELS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ToolMissing(f"nvcc could not be installed: {(done.stderr or done.stdout).strip()[-2000:]}")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return find_nvcc(build_dir)


def _add_shared(usages: Iterable[Usage], figure: str, readelf: Path, output: Path) -> None:
    more = parse_at_launch(_run([readelf, "-sW", output]))
    for usage in usages:
        if usage.entry:
            usage.figures[figure] += more


def _hip_version(*folders: Path) -> str:
    for folder in folders:
        with contextlib.suppress(OSError):
            text = (folder / "hip/hip_version.h").read_text()
            return ".".join(re.findall(r"#define HIP_VERSION_M(?:AJOR|INOR) +(\d+)", text))
    return "unknown"


def compile_amd(unit: Unit, build_dir: Path, hipified: bool = False) -> tuple[list[Usage], str, str]:
    """Compiles a unit for gfx942 into `build_dir`: its kernels, the compiler's name, and its warnings.

    Raises ToolMissing or CompileFailed.
    """
    clang, readelf, bitcode = amd_tools(build_dir)
    headers = None
    if hipified:
        headers = hip_headers()
        unit = hipify(unit, build_dir / "gfx942-hipify" / unit.name)
    output = build_dir / f"{'gfx942-hipify' if hipified else 'gfx942'}-{unit.name}.co"
    command = [clang, "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "--offload-arch=gfx942"]
    command += ["-D__HIP_PLATFORM_AMD__=1"]  # as hipcc has it
    command += [f"--rocm-path={_SYSTEM}", f"--rocm-device-lib-path={bitcode.resolve()}"]
    command += ["-isystem", headers] if headers else []
    command += [*_defaults(unit.options, ("-O3", "-std=c++17")), *unit.options, unit.source, "-o", output]
    warnings = _run(command)
    usages = parse_amd_notes(_run([readelf, "--notes", output]))
    _add_shared(usages, "lds_bytes", readelf, output)
    version = re.search(r"clang version \S+", _run([clang, "--version"]))
    places = ([headers] if headers else []) + [_SYSTEM / "include"]
    return usages, f"{version[0] if version else clang}, HIP {_hip_version(*places)} headers", warnings


def compile_nvidia(unit: Unit, build_dir: Path) -> tuple[list[Usage], str, str]:
    """Compiles a unit for sm_90a into `build_dir`: its kernels, the compiler's name, and its warnings.

    Raises ToolMissing or CompileFailed.
    """
    nvcc = find_nvcc(build_dir)
    output = build_dir / f"sm_90a-{unit.name}.cubin"
    command = [nvcc, "-cubin", "-arch=sm_90a", "-Xptxas", "-v", *_defaults(unit.options, ("-O3", "-std=c++17"))]
    text = _run([*command, *unit.options, unit.source, "-o", output])
    known = re.compile(r"^ptxas info|^\s+\d+ bytes stack frame")
    warnings = "\n".join(line for line in text.splitlines() if not known.match(line))
    version = re.search(r"release [\d.]+, V([\d.]+)", _run([nvcc, "--version"]))
    usages = parse_ptxas(text)
    _add_shared(usages, "shared_bytes", Path("readelf"), output)
    return usages, f"nvcc {version[1] if version else nvcc}", warnings


# --------------------------------------------------------------------------------------------------------------- report


def demangled(names: Sequence[str]) -> dict[str, str]:
    """C++ names without their parameters, by mangled name; as they are where c++filt (binutils) isn't there."""
    readable = list(names)
    if shutil.which("c++filt") and names:
        text = "\n".join(names) + "\n"
        done = subprocess.run(["c++filt", "-p"], input=text, capture_output=True, text=True)
        if done.returncode == 0 and len(done.stdout.splitlines()) == len(names):
            readable = done.stdout.splitlines()
    return dict(zip(names, readable, strict=True))


def check(target: str, unit: Unit, build_dir: Path) -> dict:
    """Compiles a unit for a target of TARGETS and holds it to the limits.

    Returns {"target", "unit", "compiler", "seconds" (wall clock), "warnings", "rows": one per kernel with its figures
    (Usage.figures) and "over", a list of what exceeds a limit and by how much}. Raises
    ToolMissing or CompileFailed; the latter too when no kernel came out.
    """
    build_dir.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if target == "sm_90a":
        usages, compiler, warnings = compile_nvidia(unit, build_dir)
    else:
        usages, compiler, warnings = compile_amd(unit, build_dir, hipified=target == "gfx942-hipify")
    seconds = time.perf_counter() - start
    if not any(usage.entry for usage in usages):
        raise CompileFailed(f"no kernel came out of {unit.source}: is a macro missing that its kernels depend on?")
    names = demangled([usage.kernel for usage in usages])
    rows = []
    for usage in usages:
        row = {"target": target, "unit": unit.name, "kernel": names[usage.kernel], "entry": usage.entry}
        rows.append(row | usage.figures | {"over": over_limits(usage, TARGETS[target])})
    return {
        "target": target,
        "unit": unit.name,
        "compiler": compiler,
        "seconds": round(seconds, 1),
        "warnings": warnings.strip(),
        "rows": rows,
    }


def table(rows: Sequence[dict], columns: Sequence[str]) -> str:
    """Rows of `check` as text: target, kernel (its unit in front), then the figures named; - where there is none."""
    lines = [["target", "kernel", *columns]]
    for row in rows:
        name = f"{row['unit']}: {row['kernel']}" + ("" if row["entry"] else " (function)")
        lines.append([row["target"], name, *(str(row.get(column, "-")) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligns = ["<", "<", *[">"] * len(columns)]
    return "\n".join(
        "  ".join(f"{cell:{align}{width}}" for cell, align, width in zip(line, aligns, widths, strict=True)).rstrip()
        for line in lines
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status described above."""
    parser = argparse.ArgumentParser(prog="python -m megakernel.compile_check", description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="all by default")
    parser.add_argument("--source", type=Path, help="another device source, without options")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel or failure")
    parser.add_argument("--build-dir", type=Path, default=Path("build/compile_check"), help="default: %(default)s")
    parser.add_argument("--fetch-nvcc", action="store_true", help="install nvcc from PyPI where there is none, and end")
    options = parser.parse_args(arguments)
    build_dir = options.build_dir.resolve()
    if options.fetch_nvcc:
        try:
            print(fetch_nvcc(build_dir))
        except ToolMissing as error:
            _say(str(error))
            return MISSING
        return 0
    if options.source and not options.source.is_file():
        parser.error(f"there is no file {options.source}")
    status = 0
    for target in options.target:
        results = []
        try:
            units = (
                [Unit(options.source.stem, options.source)]
                if options.source
                else sources_and_options(target, build_dir)
            )
        except FileNotFoundError as error:
            parser.error(str(error))
        for unit in units:
            try:
                result = check(target, unit, build_dir)
            except (ToolMissing, CompileFailed) as error:
                missing = isinstance(error, ToolMissing)
                status = (status or MISSING) if missing else FAILED
                _say(f"{target}, {unit.name}: {'' if missing else 'failed: '}{error}")
                if options.json:
                    row = {"target": target, "unit": unit.name, "missing" if missing else "error": str(error)}
                    print(json.dumps(row), flush=True)
                continue
            results.append(result)
            if result["warnings"]:
                _say(f"{target}, {unit.name}: {result['warnings']}")
            if options.json:
                for row in result["rows"]:
                    print(json.dumps(row | {key: result[key] for key in ("compiler", "seconds")}), flush=True)
        rows = [row for result in results for row in result["rows"]]
        if rows and not options.json:
            seconds = sum(result["seconds"] for result in results)
            print(f"{target}: {results[0]['compiler']}, {seconds:.1f} s")
            print(table(rows, TARGETS[target].columns), flush=True)
        for row in rows:
            for over in row["over"]:
                status = FAILED
                _say(f"{target}, {row['unit']}: kernel {row['kernel']}: {over}")
    return status


if __name__ == "__main__":
    sys.exit(main())
