"""The notebook runner behind `fmms run`: executes notebooks with a profile's parameters, safely and resumably.

Each notebook runs in a kernel of its own. Its executed copy goes to `build/<profile>/` only once it is whole; a note
beside it (`<name>.json`) holds a digest of everything the run depended on, by which the next run knows what is done.
Parameters are fmms.notebooks' business, HTML is fmms.report's.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fmms import atomic, doctor, notebooks, paths
from fmms.bench import records
from fmms.notebooks import Job, NotebookError, UnreadableError
from fmms.progress import Progress

SOURCES = {".py", ".j2", ".css", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".hip"}
LONGEST_WAIT = 1e6  # seconds that the messaging library can be told to wait; more is no limit
START_TIMEOUT = 180  # seconds for a kernel to come up: the first import of a large package on a cold disk


class Stopped(KeyboardInterrupt):
    """SIGTERM arrived: the same way out as Ctrl-C, with its own exit status."""


def run(
    names: list[str] | None,
    profile: str,
    overrides: dict[str, str] | None = None,
    force: bool = False,
    timeout: float | None = None,
) -> int:
    """Runs notebooks one after the other, renders the report and returns the exit status.

    names, overrides: as `fmms.notebooks.find` and `.job` take them. force: also those that are up to date. timeout:
    seconds a notebook may take. Returns 0 when each notebook passed or was up to date, 1 when one failed, 130 after
    Ctrl-C and 143 after SIGTERM. Raises NotebookError before anything runs for a name, a parameter or a value that
    can't be right, and OSError when results, figures or copies could not be written.
    """
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise NotebookError(f"the timeout is {timeout:g} s; expected more than 0, and a finite number")
    jobs = _jobs(names, profile, overrides)
    folder = paths.build_dir(profile)
    _check_writable(profile)
    folder.mkdir(parents=True, exist_ok=True)
    with _sole_user(folder), _sigterm_as_interrupt():
        results = []
        try:
            for number, job in enumerate(jobs, 1):
                results.append(_one(job, f"[{number}/{len(jobs)}] {job.name}", force, timeout))
        except KeyboardInterrupt as stop:
            done = ", ".join(result["name"] for result in results if result["status"] != "failed") or "none"
            print(f"\nstopped during {job.name}; done: {done}. The same command continues here.", flush=True)
            return 143 if isinstance(stop, Stopped) else 130
    _summary(results)
    print(f"executed copies: build/{profile}/", flush=True)
    _render(profile)
    return int(any(result["status"] == "failed" for result in results))


def state_file(profile: str, name: str) -> Path:
    """The runner's note on a notebook's last finished run."""
    return paths.build_dir(profile) / f"{name}.json"


def read_state(profile: str, name: str) -> dict:
    """That note; {} when the notebook has not finished since it was last started, or the note is unusable."""
    try:
        state = json.loads(state_file(profile, name).read_text(encoding="utf-8"))
        return state if _usable(state) else {}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return {}


def _usable(state) -> bool:
    """Whether a note has all that the runner and the report take from it; may raise for one of another shape."""
    error, machine = state["error"], state["machine"]
    git, gpus = machine["git"], machine["gpus"]
    texts = [state["name"], state["digest"], state["finished"], machine["cpu"], *state["outputs"]]
    if state["status"] == "failed":
        texts += [error["where"], error["what"] or None]
    return (
        (state["status"] == "failed" or (state["status"] == "passed" and error is None))
        and isinstance(state["seconds"], int | float)
        and isinstance(machine["versions"], dict)
        and isinstance(git["commit"], str | None)
        and "dirty" in git
        and "cores" in machine
        and all({"name", "driver"} <= gpu.keys() for gpu in gpus)
        and all(isinstance(text, str) for text in texts)
    )


def digest(job: Job) -> str:
    """SHA-256 over what a notebook's result depends on: its source, parameters, our sources, torch's and triton's
    versions."""
    total = hashlib.sha256()
    package = Path(__file__).resolve().parent
    sources = [
        file
        for folder in (package, package.parent / "megakernel")
        for file in sorted(folder.rglob("*"))
        if file.suffix in SOURCES
    ]
    for file in (job.path, *sources):
        total.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    versions = {name: _version(name) for name in ("torch", "triton")}
    facts = [job.name, job.profile, job.parameters, platform.python_version(), versions]
    total.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return total.hexdigest()


def _jobs(names: list[str] | None, profile: str, overrides: dict[str, str] | None) -> list[Job]:
    """Every job, or one error with all that is wrong, so that a user mends it in one go."""
    try:
        import papermill  # noqa: F401
    except ImportError as error:
        raise NotebookError(notebooks.EXTRA) from error
    jobs, faults = [], []
    for path in notebooks.find(names):
        try:
            jobs.append(notebooks.job(path, profile, overrides))
        except UnreadableError as error:
            jobs.append(Job(path, profile, {}, {}, str(error)))
        except NotebookError as error:
            faults.append(str(error))
    if faults:
        raise NotebookError("\n".join(faults))
    return jobs


def _one(job: Job, label: str, force: bool, timeout: float | None) -> dict:
    """Runs one notebook unless it is up to date; returns its result as the state file holds it."""
    if job.fault:
        print(f"{label}  failed  {job.fault}", flush=True)
        error = {"cell": 0, "where": "before its first cell", "what": job.fault}
        return {"name": job.name, "status": "failed", "seconds": 0.0, "error": error}
    stamp = digest(job)
    state = read_state(job.profile, job.name)
    if not force and _up_to_date(job, state, stamp):
        print(f"{label}  up to date since {state['finished']}: skipped (--force runs it again)", flush=True)
        return {**state, "skipped": True}
    folder = paths.build_dir(job.profile)
    running = folder / f".{job.name}.running.ipynb"
    # From here until it has finished this notebook counts as not done, whatever happens to this process.
    state_file(job.profile, job.name).unlink(missing_ok=True)
    before = _written(job.profile)
    with Progress(label) as progress:
        error = _execute(job, running, progress, timeout)
        seconds = progress.seconds
        progress.end("failed" if error else "passed")
    finished = folder / f"{job.name}.ipynb"
    failed = folder / f"{job.name}.failed.ipynb"
    if running.exists():  # not when the kernel never came up
        atomic.write_bytes(failed if error else finished, running.read_bytes())
        running.unlink()
    if not error:
        failed.unlink(missing_ok=True)
    else:
        print(f"    {error['where']}\n    {error['what']}", flush=True)
    after = _written(job.profile)
    machine = records.run_metadata()
    state = {
        "name": job.name,
        "status": "failed" if error else "passed",
        "digest": stamp,
        "finished": machine["utc"],
        "seconds": round(seconds, 1),
        "cells": progress.total,
        "error": error,
        "parameters": job.parameters,
        "outputs": sorted(name for name, mark in after.items() if before.get(name) != mark),
        "machine": {key: machine[key] for key in ("cpu", "cores", "gpus", "platform", "versions", "git")},
    }
    atomic.write_text(state_file(job.profile, job.name), records.strict_json(state))
    return state


def _up_to_date(job: Job, state: dict, stamp: str) -> bool:
    if state.get("status") != "passed" or state.get("digest") != stamp:
        return False
    root = paths.project_root()
    copy = paths.build_dir(job.profile) / f"{job.name}.ipynb"
    try:
        notebooks.read(copy)
    except NotebookError as error:
        if copy.exists():
            print(f"    {error}; it is made again", flush=True)
        return False
    return all((root / name).is_file() for name in state["outputs"])


def _execute(job: Job, copy: Path, progress: Progress, timeout: float | None) -> dict | None:
    """Executes the notebook into `copy`; returns None, or where and what went wrong."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    deadline = time.monotonic() + timeout if timeout else math.inf

    def on_cell(cells, index):
        progress.cell(cells, index)
        if time.monotonic() >= deadline:
            raise CellTimeoutError("before this cell")

    def left(cell) -> float | None:
        seconds = deadline - time.monotonic()
        return max(0.001, seconds) if seconds < LONGEST_WAIT else None

    _register_engine(papermill)
    try:
        with _kernelspec(job):
            papermill.execute_notebook(
                str(job.path),
                str(copy),
                parameters=job.parameters,
                engine_name="fmms",
                kernel_name="python3",
                progress_bar=False,
                start_timeout=START_TIMEOUT,
                cwd=str(paths.project_root()),
                on_cell=on_cell,
                timeout_func=left,
            )
    except papermill.PapermillExecutionError as error:
        what = f"{error.ename}: {error.evalue}"
    except CellTimeoutError:
        what = f"the notebook took longer than its {timeout:g} s (--timeout)"
    except DeadKernelError:
        what = "the kernel died: killed by the system for want of memory, or a crash in native code"
    except Exception as error:  # whatever it is, the notebooks that follow still run
        what = f"{type(error).__name__}: {error}"
    else:
        return None
    lines = [line for line in progress.source.splitlines() if line.strip()]
    where = f"cell {progress.number} of {progress.total}: {lines[0].strip()}" if lines else "before its first cell"
    return {"cell": progress.number, "where": where, "what": "\n    ".join(what.strip().splitlines()[:6])}


def _register_engine(papermill) -> None:
    """Papermill's own engine, telling about each cell it starts."""
    from papermill.engines import NBClientEngine, papermill_engines

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, on_cell=None, **options):
            start = nb_man.cell_start

            def cell_start(cell, cell_index=None, **more):
                on_cell(nb_man.nb.cells, cell_index)
                start(cell, cell_index, **more)

            nb_man.cell_start = cell_start
            return super().execute_managed_notebook(nb_man, kernel_name, **options)

    papermill_engines.register("fmms", Engine)


@contextlib.contextmanager
def _kernelspec(job: Job) -> Iterator[None]:
    """Makes "python3" mean this very interpreter with this very checkout, whatever kernels are registered."""
    from ipykernel.kernelspec import get_kernel_dict

    folder = paths.build_dir(job.profile) / ".jupyter"
    here = str(Path(__file__).resolve().parent.parent)
    environment = {
        "FMMS_ROOT": str(paths.project_root()),
        "FMMS_COMMAND": _command(job),
        "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))),
        # Triton reads this when kernels are defined, so it must be set before the kernel's first import.
        "TRITON_INTERPRET": "1" if job.profile == "cpu" else "0",
    }
    # The log level: a failing cell is reported by us, the kernel's own remarks on it are noise.
    spec = {**get_kernel_dict(["--log-level=50"]), "env": environment}
    atomic.write_text(folder / "kernels" / "python3" / "kernel.json", json.dumps(spec, indent=1))
    before = os.environ.get("JUPYTER_PATH")
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["JUPYTER_PATH"]
        else:
            os.environ["JUPYTER_PATH"] = before


def _command(job: Job) -> str:
    """A command that repeats this run, for the metadata of its results."""
    values = [f"-p {shlex.quote(f'{name}={value}')}" for name, value in job.overrides.items()]
    return " ".join(["fmms run", job.name, "--profile", job.profile, *values])


@contextlib.contextmanager
def _sole_user(folder: Path) -> Iterator[None]:
    """Holds a lock on a build folder: two runners in one folder would take each other's temporary files."""
    with open(folder / ".lock", "a", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, so never stale
        except OSError as error:
            raise NotebookError(
                f"another `fmms run` is using build/{folder.name}/; wait for it to end or stop it"
            ) from error
        yield


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def stop(number, frame):
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_writable(profile: str) -> None:
    """OSError when what the notebooks make could not be saved: better now than after hours of them."""
    shut = doctor.shut_folders(profile)
    if shut:
        places = ", ".join(
            f"{name}/ ({place} is {'not writable' if place.is_dir() else 'a file'})" for name, place in shut.items()
        )
        raise OSError(f"no notebook was run: nothing can be written to {places}")


def _render(profile: str) -> None:
    """The report, as far as there is something to render: what it lacks is named and is no reason to fail here."""
    from fmms import report

    faults = []
    try:
        print(f"report: {report.render(profile, faults)}", flush=True)
    except NotebookError as error:
        faults = [str(error)]
    for fault in faults:
        print(f"fmms: {fault}", file=sys.stderr)


def _written(profile: str) -> dict[str, tuple[int, int]]:
    """Results and figures there are, with what changes when one is written anew."""
    root = paths.project_root()
    found = {}
    for folder in (paths.data_dir(profile), paths.figures_dir(profile)):
        for file in folder.glob("*") if folder.is_dir() else ():
            if file.is_file() and file.suffix != ".html" and not file.name.startswith("."):
                stat = file.stat()
                found[str(file.relative_to(root))] = (stat.st_mtime_ns, stat.st_ino)
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _summary(results: list[dict]) -> None:
    width = max(len("notebook"), *(len(result["name"]) for result in results))
    print(f"\n{'notebook':<{width}}  {'result':<10}  {'seconds':>7}")
    for result in results:
        status = "up to date" if result.get("skipped") else result["status"]
        print(f"{result['name']:<{width}}  {status:<10}  {result['seconds']:>7.1f}", end="")
        error = result["error"]
        print(f"  {error['where']}: {error['what'].splitlines()[0]}" if error else "")
    failed = sum(result["status"] == "failed" for result in results)
    print(
        f"{len(results) - failed} of {len(results)} notebooks are in order" + (f", {failed} failed" if failed else "")
    )
