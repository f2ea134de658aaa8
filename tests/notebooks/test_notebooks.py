"""Every notebook is clean, and has parameters for every profile that it knows. Running them is `make report`'s part."""

from pathlib import Path

import pytest

from fmms import notebooks

pytest.importorskip("papermill")
ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("cpu", "h200")
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.fixture(autouse=True)
def _this_project(monkeypatch):
    monkeypatch.setenv("FMMS_ROOT", str(ROOT))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(path):
    """One tagged parameters cell, one plain line each; no outputs, no execution counts; kernel python3; no maths that
    needs a script to draw."""
    assert notebooks.lint(path) == []


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_profile_sets_known_parameters_of_the_right_type(path, profile):
    job = notebooks.job(path, profile)
    assert job.parameters["profile"] == profile


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_line_of_the_parameters_cell_is_read(path):
    """Papermill skips a line that it can't parse with no more than a warning."""
    declared = notebooks.parameters(path)
    assert all(one.type != "None" and one.help for one in declared.values())


def test_no_parameter_file_is_left_over():
    names = {path.stem for path in NOTEBOOKS}
    left = [file for file in ROOT.glob("notebooks/params/*/*") if file.stem not in names or file.suffix != ".yaml"]
    assert not left
    assert set(notebooks.profiles()) == set(PROFILES)
