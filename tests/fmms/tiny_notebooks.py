"""Makes small projects with small notebooks for the tests of the runner, the report and the doctor."""

from pathlib import Path

import nbformat
import yaml
from nbformat import v4

PARAMETERS = 'profile: str = "cpu"  # which set of sizes; where results go\nn: int = 1  # how many'


def project(folder: Path) -> Path:
    """An empty project, enough for fmms.paths to take the folder for one."""
    (folder / "notebooks").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("")
    return folder


def add(root: Path, name: str, *cells: str, parameters: str = PARAMETERS, text: str = "# Title\n\nText.", **given):
    """Writes a notebook with these code cells and its cpu parameter file; returns the notebook's path."""
    declared = v4.new_code_cell(parameters)
    declared.metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    code = [v4.new_code_cell(cell) for cell in cells]
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell(text), declared, *code], metadata={"kernelspec": kernel})
    path = root / "notebooks" / f"{name}.ipynb"
    nbformat.write(notebook, path)
    file = root / "notebooks" / "params" / "cpu" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"profile": "cpu", **given}))
    return path
