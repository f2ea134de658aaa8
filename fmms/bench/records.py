"""Result records: long-form CSV in `data/<profile>/` beside JSON metadata that says how and where the rows were made.

Figures and reports are drawn from these files, never from numbers in memory or in a text. Drawing is left to
fmms.plotting, measuring to the modules that make the rows.
"""

import csv
import datetime
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from fmms import atomic, paths

PACKAGES = ("torch", "triton", "numpy", "transformers", "accelerate", "gguf", "scipy", "pandas", "matplotlib")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def save(name: str, profile: str, rows, columns: Iterable[str] | None = None, **extra) -> Path:
    """Writes `data/<profile>/<name>.csv` and `<name>.json`; returns the path of the CSV.

    rows: list of dicts or a pandas DataFrame, one result each. columns: their order and selection; by default every
    key in the order of first appearance. Missing values and NaN become empty fields. extra: what else the metadata
    should hold, for instance parameters.

    Each file is complete or as it was. The metadata carries the CSV's SHA-256, so `load` notices the one case left, a
    kill between the two files. Raises ValueError for a bad name, for rows that are no mappings or for no columns.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name is {name!r}; expected letters, digits, _, - and ., such as '10_exactness_pvalues'")
    rows = _as_dicts(rows)
    columns = list(columns) if columns is not None else list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        raise ValueError(f"no rows and no columns to write for {name!r}; pass columns=[...] to write an empty table")
    table = _to_csv(rows, columns)
    metadata = {
        "name": name,
        "profile": profile,
        **run_metadata(),
        "rows": len(rows),
        "columns": columns,
        "csv_sha256": _digest(table),
        "extra": extra,
    }
    folder = paths.data_dir(profile)
    path = folder / f"{name}.csv"
    with atomic.replacing(path) as csv_file, atomic.replacing(folder / f"{name}.json") as json_file:
        csv_file.write_bytes(table)
        json_file.write_text(strict_json(metadata), encoding="utf-8")
    return path


def load(name: str, profile: str):
    """The rows of `data/<profile>/<name>.csv` as a pandas DataFrame; empty fields become NaN, other text stays text.

    Raises FileNotFoundError when the notebook has not run, ValueError when CSV and metadata don't belong together.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("reading results needs pandas: pip install -e '.[notebooks]'") from error
    path = paths.data_dir(profile) / f"{name}.csv"
    if not path.is_file():
        raise FileNotFoundError(
            f"no results at data/{profile}/{name}.csv; the notebook that writes them makes them: "
            f"fmms run {name[:2]} --profile {profile}"
        )
    content = path.read_bytes()
    if metadata(name, profile).get("csv_sha256") != _digest(content):
        raise ValueError(
            f"data/{profile}/{name}.csv does not belong to {name}.json (a stopped run, or an edit by hand); "
            f"make both again: fmms run {name[:2]} --profile {profile} --force"
        )
    return pandas.read_csv(io.BytesIO(content), keep_default_na=False, na_values=[""])


def metadata(name: str, profile: str) -> dict:
    """The metadata that `save` wrote beside the rows; FileNotFoundError when there is none."""
    path = paths.data_dir(profile) / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no metadata at data/{profile}/{name}.json; the notebook that writes {name}.csv makes it"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def run_metadata() -> dict:
    """How, when and on what this process runs: command, git state, UTC time, CPU, GPUs, versions. No absolute paths.

    Where there is no git history (a copy of a checkout on another host), the environment variable FMMS_COMMIT may name
    the commit. FMMS_COMMAND, set by the runner, names the command that started a notebook.
    """
    return {
        "command": _command(),
        "git": _git_state(),
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "gpus": gpus(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **_versions()},
    }


def strict_json(value) -> str:
    """JSON any parser reads: NaN and infinities become null, scalars of numpy and torch numbers, paths their names."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def cpu_model() -> str:
    """The processor's name as the operating system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpus() -> list[dict]:
    """One dict per GPU that the driver shows: name, driver, total_mib, free_mib; [] without one. Needs no torch for
    NVIDIA; AMD devices come from torch and have no driver field of their own."""
    listing = _output(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.free", "--format=csv,noheader,nounits"]
    )
    found = []
    for line in (listing or "").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:
            total, free = (int(field) if field.isdigit() else None for field in fields[2:])
            found.append({"name": fields[0], "driver": fields[1], "total_mib": total, "free_mib": free})
    if found:
        return found
    try:
        import torch

        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            driver = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
            found.append(
                {
                    "name": torch.cuda.get_device_name(index),
                    "driver": driver,
                    "total_mib": total >> 20,
                    "free_mib": free >> 20,
                }
            )
    except (ImportError, RuntimeError, AttributeError):
        pass
    return found


def _digest(table: bytes) -> str:
    """SHA-256 of a CSV, the same after a checkout that turned its line ends."""
    return hashlib.sha256(table.replace(b"\r\n", b"\n")).hexdigest()


def _as_dicts(rows) -> list[dict]:
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        return rows.astype(object).where(rows.notna(), None).to_dict("records")
    rows = list(rows)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"rows[{number}] is a {type(row).__name__}; expected a dict of column: value")
    return [dict(row) for row in rows]


def _to_csv(rows: list[dict], columns: list[str]) -> bytes:
    lines = [_csv_line(columns), *(_csv_line([_field(row.get(column)) for column in columns]) for row in rows)]
    return "".join(lines).encode("utf-8")


def _csv_line(values: list) -> str:
    text = io.StringIO(newline="")
    # before Python 3.13 a lone carriage return is quoted only if it is part of the line's end
    csv.writer(text, lineterminator="\r\n").writerow(values)
    return text.getvalue()[:-2] + "\n"


def _field(value):
    value = _scalar(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value if isinstance(value, str | int | float) else str(value)


def _scalar(value):
    """Numpy scalars and 0-dimensional tensors as Python numbers, so that every file reads the same."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _plain(value):
    value = _scalar(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Path):
        return value.name
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


def _command() -> str:
    named = os.environ.get("FMMS_COMMAND")
    if named:
        return named
    if "ipykernel_launcher" in sys.argv[0] or "ipykernel" in sys.modules:
        return "a Jupyter kernel"
    return " ".join(_without_folder(word) for word in sys.argv) or "python"


def _without_folder(word: str) -> str:
    """An absolute path says where someone's files lie, which is nobody's business; its last part is kept."""
    return re.sub(r"(^|=)/\S*/(\S*)$", r"\1\2", word)


def _git_state() -> dict:
    """commit (or None) and dirty (None where git can't tell). Results and figures don't count as changes: writing them
    is what a run does."""
    try:
        root = paths.project_root()
    except FileNotFoundError:
        return {"commit": os.environ.get("FMMS_COMMIT"), "dirty": None}
    commit = _output(["git", "rev-parse", "HEAD"], root)
    if commit is None:
        return {"commit": os.environ.get("FMMS_COMMIT"), "dirty": None}
    changes = _output(["git", "status", "--porcelain", "--", ".", ":(exclude)data", ":(exclude)figures"], root)
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _output(command: list[str], folder: Path | None = None) -> str | None:
    """What a command prints, or None where it is missing, fails or takes over 20 s."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
