"""A built wheel holds every source file it needs and works outside the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [name for name in ("fmms", "megakernel") if (ROOT / name).is_dir()]
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")
SMOKE = """
import sys, torch, fmms
from fmms import report
assert fmms.__file__.startswith(sys.argv[1]), fmms.__file__
hidden, weight = torch.randn(3, 16), torch.randn(50, 16)
ids = fmms.sample(hidden, weight, temperature=1.0, seed=0, impl="torch").ids
assert ids.shape == (3,) and ids.dtype == torch.int64 and (0 <= ids).all() and (ids < 50).all()
assert "{" in report._template("page.css")
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel's content, built from a copy so that the checkout stays free of build folders."""
    pytest.importorskip("setuptools", minversion="77")
    source, wheels, content = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "content"))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(wheels),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(content)
    return content


def test_wheel_holds_every_file_of_the_packages(unpacked):
    def files(root):
        found = (path for package in PACKAGES for path in (root / package).rglob("*"))
        return {str(path.relative_to(root)) for path in found if path.is_file() and "__pycache__" not in path.parts}

    assert files(unpacked) == files(ROOT)
    assert "fmms/py.typed" in files(unpacked)


def test_wheel_states_licence_version_and_command(unpacked):
    (about,) = unpacked.glob("fmms-*.dist-info")
    metadata = (about / "METADATA").read_text()
    assert "License-Expression: MIT" in metadata
    assert 'Requires-Dist: triton>=3.6; sys_platform == "linux"' in metadata
    assert "fmms = fmms.cli:main" in (about / "entry_points.txt").read_text()
    assert list(about.rglob("LICENSE"))


def test_wheel_works_outside_the_checkout(unpacked, tmp_path):
    environment = {"PYTHONPATH": str(unpacked), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-c", SMOKE, str(unpacked)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
