"""What the notebooks are: which there are, what parameters each declares and a profile sets, what a clean one is.

Running them is fmms.run's work, rendering fmms.report's.
"""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from fmms import paths

EXTRA = "running and rendering notebooks needs more packages: pip install -e '.[notebooks]'"
PARAMETER_LINE = re.compile(r"[A-Za-z_]\w*: [\w\[\], ]+ = [^=]+  # [^=\s][^=]*")  # what papermill reads, and a meaning
_TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list": list}


class NotebookError(Exception):
    """Something about a notebook or its parameters that its user can put right; the message says how."""


class UnreadableError(NotebookError):
    """A notebook's file is cut short or holds something else; the message names it."""


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: name, type as written, default as written, meaning."""

    name: str
    type: str
    default: str
    help: str


@dataclass(frozen=True)
class Job:
    """One notebook with the parameters that a profile and the command line give it."""

    path: Path
    profile: str
    parameters: dict
    overrides: dict[str, str]  # those of the command line, as typed
    fault: str = ""  # why the notebook's file cannot be read, and hence not run

    @property
    def name(self) -> str:
        return self.path.stem


def find(names: list[str] | None = None) -> list[Path]:
    """The notebooks that `names` mean, in the order of their numbers; all of `notebooks/` without names.

    A name is a number ("00"), a stem ("00_environment") or a path. Raises NotebookError for one that means nothing.
    """
    folder = paths.project_root() / "notebooks"
    known = sorted(path for path in folder.glob("*.ipynb") if not path.name.startswith("."))
    if not names:
        if not known:
            raise NotebookError("notebooks/ holds no notebook")
        return known
    found = []
    for name in names:
        matches = [path for path in known if name in (path.stem, path.name, path.stem.split("_")[0])]
        if not matches and Path(name).suffix == ".ipynb" and Path(name).is_file():
            matches = [Path(name).resolve()]
        if not matches:
            stems = ", ".join(path.stem for path in known) or "none"
            raise NotebookError(f"no notebook is called {name!r}; there are: {stems} (the number alone will do)")
        found.extend(matches)
    return sorted(dict.fromkeys(found), key=lambda path: path.name)


def profiles() -> list[str]:
    """The profiles that `notebooks/params/` has a folder for."""
    return sorted(path.name for path in (paths.project_root() / "notebooks" / "params").glob("*") if path.is_dir())


def read(path: Path):
    """A notebook as nbformat holds it; UnreadableError for a file that holds none."""
    try:
        import nbformat
    except ImportError as error:
        raise NotebookError(EXTRA) from error
    try:
        text = path.read_text(encoding="utf-8")
        _check_shape(json.loads(text))
        return nbformat.reads(text, as_version=4)
    except Exception as error:
        raise UnreadableError(f"{_shown(path)} cannot be read as a notebook: {_one_line(error)}") from error


def parameters(path: Path) -> dict[str, Parameter]:
    """The parameters that a notebook's tagged cell declares, by name."""
    try:
        import papermill
    except ImportError as error:
        raise NotebookError(EXTRA) from error
    read(path)
    try:
        declared = papermill.inspect_notebook(str(path))
    except Exception as error:
        raise UnreadableError(f"{_shown(path)} cannot be read as a notebook: {_one_line(error)}") from error
    return {
        name: Parameter(name, one["inferred_type_name"], one["default"], one["help"]) for name, one in declared.items()
    }


def parameter_file(path: Path, profile: str) -> Path:
    """`notebooks/params/<profile>/<name>.yaml`, whether it exists or not."""
    return paths.project_root() / "notebooks" / "params" / profile / f"{path.stem}.yaml"


def job(path: Path, profile: str, overrides: dict[str, str] | None = None) -> Job:
    """The notebook with the parameters of its profile's file and `overrides`, the texts after `-p name=` on top.

    Raises NotebookError that names the notebook for a missing parameter file, for a parameter it doesn't declare and
    for a value of another type than declared.
    """
    try:
        import yaml  # noqa: F401
    except ImportError as error:
        raise NotebookError(EXTRA) from error
    paths.check_profile(profile)
    declared = parameters(path)
    file = parameter_file(path, profile)
    if not file.is_file():
        known = ", ".join(profiles()) or "none"
        raise NotebookError(
            f"{path.stem} has no parameters for profile {profile!r}: notebooks/params/{profile}/{file.name} is missing "
            f"(profiles: {known})"
        )
    where = f"notebooks/params/{profile}/{file.name}"
    values = {name: (value, where) for name, value in _file_values(file, where).items()}
    for name, text in (overrides or {}).items():
        values[name] = (_value(path, name, text, declared[name].type if name in declared else ""), "-p")
    if "profile" in declared:
        value, source = values.setdefault("profile", (profile, "--profile"))
        if value != profile:
            raise NotebookError(f"{path.stem}: {source} sets profile to {value!r}; use --profile {value} instead")
    unknown = sorted(str(name) for name in values if name not in declared)
    if unknown:
        source = values[unknown[0]][1] if unknown[0] in values else where
        known = ", ".join(f"{one.name}: {one.type}" for one in declared.values()) or "none"
        raise NotebookError(f"{path.stem} has no parameter {', '.join(unknown)} (from {source}); it knows: {known}")
    typed = {name: _typed(path, declared[name], *given) for name, given in values.items()}
    return Job(path, profile, typed, dict(overrides or {}))


def _file_values(file: Path, where: str) -> dict:
    """What a parameter file sets; `where` is its name in messages."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        given = yaml.safe_load(text) or {}
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise NotebookError(f"{where} is not UTF-8 text: {error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise NotebookError(f"{where} is no valid YAML: {_one_line(error)}") from error
    if not isinstance(given, dict):
        raise NotebookError(f"{where} holds a {type(given).__name__}; expected lines of `name: value`")
    names = [key.value for key, _ in node.value if isinstance(key.value, str)] if given else []
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise NotebookError(f"{where} sets {', '.join(twice)} more than once; keep one line of each")
    return given


def _value(path: Path, name: str, text: str, hint: str):
    """What `-p name=text` means. A text parameter takes its value as typed: `-p model=2` is the text "2"."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        if hint in ("str", "Optional[str]"):
            return text
        raise NotebookError(f"{path.stem}: -p {name} is no valid YAML: {_one_line(error)}") from error
    plain = hint == "str" or (hint == "Optional[str]" and value is not None)
    return text if plain and not isinstance(value, str) else value


def _check_shape(notebook) -> None:
    """ValueError unless JSON has a notebook's shape, as far as this project looks into one."""
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ValueError("expected an object with a list of cells")
    metadata = notebook.get("metadata", {})
    if not isinstance(metadata, dict) or not isinstance(metadata.get("kernelspec", {}), dict):
        raise ValueError("its metadata is no object")
    for number, cell in enumerate(notebook["cells"], 1):
        if not isinstance(cell, dict) or not isinstance(cell.get("cell_type"), str):
            raise ValueError(f"cell {number} has no type")
        source = cell.get("source")
        lines = source if isinstance(source, list) else [source]
        if not all(isinstance(line, str) for line in lines):
            raise ValueError(f"cell {number} has no source text")
        about = cell.get("metadata", {})
        if not isinstance(about, dict) or not isinstance(about.get("tags", []), list):
            raise ValueError(f"cell {number} has metadata of the wrong shape")


def _shown(path: Path) -> str:
    """A path for a message: relative to the project where it lies in it."""
    root = paths.project_root()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _one_line(error: Exception) -> str:
    """An exception's message in one line of bearable length: nbformat's holds the whole file."""
    text = " ".join(str(error).split())
    return (text if len(text) <= 160 else f"{text[:160]} ...") or type(error).__name__


def _typed(path: Path, parameter: Parameter, value, source: str):
    """`value` if it fits the declared type; an int for a float becomes one, as does YAML's text for 1e-3."""
    kind = _TYPES.get(parameter.type.split("[")[0])
    if kind is None:
        return value  # a type this file doesn't judge
    if kind is float and not isinstance(value, bool) and isinstance(value, int | str):
        with contextlib.suppress(ValueError):
            return float(value)
    items = re.fullmatch(r"list\[(int|float|str|bool)\]", parameter.type)
    if items and isinstance(value, list):
        inner = Parameter(parameter.name, items[1], "", "")
        return [_typed(path, inner, item, source) for item in value]
    if type(value) is not kind:
        raise NotebookError(
            f"{path.stem}: parameter {parameter.name} is {value!r} (from {source}), a {type(value).__name__}; "
            f"expected {parameter.type}" + (f": {parameter.help}" if parameter.help else "")
        )
    return value


def lint(path: Path) -> list[str]:
    """What keeps a notebook from being clean: one sentence per fault, [] for a clean one."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        _check_shape(notebook)
        cells = notebook["cells"]
    except (OSError, ValueError) as error:
        return [f"{path.name} cannot be read as a notebook: {error}"]
    faults = []
    for number, cell in enumerate(cells, 1):
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and (cell.get("outputs") or cell.get("execution_count") is not None):
            faults.append(f"cell {number} holds outputs or an execution count; clear them: fmms lint-notebooks --fix")
        if cell["cell_type"] == "markdown" and re.search(r"(?<!\\)\$[^\s$][^$]*\$", re.sub(r"`[^`]*`", "", source)):
            faults.append(f"cell {number} holds $maths$, which the offline report cannot draw; write it in Unicode")
    kernel = notebook.get("metadata", {}).get("kernelspec", {}).get("name")
    if kernel != "python3":
        faults.append(f"its kernel is {kernel!r}; expected 'python3', which every Jupyter has")
    tagged = [cell for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        return [*faults, f"{len(tagged)} cells are tagged 'parameters'; expected one"]
    lines = "".join(tagged[0]["source"]).splitlines()
    faults += [
        f"parameter line {line!r}; expected `name: type = value  # meaning` with one ="
        for line in lines
        if line.strip() and not line.startswith("#") and not PARAMETER_LINE.fullmatch(line)
    ]
    if not any(line.startswith("profile: str = ") for line in lines):
        faults.append('it has no parameter `profile: str = "cpu"  # which set of sizes; where results go`')
    return faults


def clear(path: Path) -> bool:
    """Removes outputs and execution counts from a notebook's file; returns whether there were any.

    A file that cannot be read is left as it is; `lint` names it.
    """
    from fmms import atomic

    try:
        text = path.read_text(encoding="utf-8")
        notebook = json.loads(text)
        _check_shape(notebook)
    except (OSError, ValueError):
        return False
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    cleared = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    if cleared == text:
        return False
    atomic.write_text(path, cleared)
    return True
