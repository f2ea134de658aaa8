"""Where a checkout keeps its notebooks, results, figures and executed copies.

Nothing here creates a folder: whoever writes a file does (see fmms.atomic).
"""

import os
import re
from pathlib import Path

_MARKS = ("pyproject.toml", "notebooks")


def _is_root(folder: Path) -> bool:
    return (folder / _MARKS[0]).is_file() and (folder / _MARKS[1]).is_dir()


def project_root() -> Path:
    """The checkout's top folder, which holds `pyproject.toml` and `notebooks/`.

    The environment variable FMMS_ROOT decides; without it the first such folder upward from the current one, then
    the one this file lies in. Raises FileNotFoundError when there is none (an installed wheel used elsewhere), or when
    FMMS_ROOT names something that is no folder.
    """
    named = os.environ.get("FMMS_ROOT")
    if named:
        folder = Path(named).expanduser().resolve()
        if not folder.is_dir():
            raise FileNotFoundError(f"FMMS_ROOT is {named!r}, which is no folder; set it to the checkout or unset it")
        return folder
    here = Path.cwd().resolve()
    for folder in (here, *here.parents, Path(__file__).resolve().parent.parent):
        if _is_root(folder):
            return folder
    raise FileNotFoundError(
        f"no project folder found: neither {here} nor a folder above it holds both pyproject.toml and notebooks/. "
        "Change into the checkout, or set FMMS_ROOT to it (to any folder, to get data/, figures/ and build/ there)"
    )


def check_profile(profile: str) -> str:
    """Returns `profile`; ValueError when it could not be the name of a folder."""
    if not isinstance(profile, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", profile):
        raise ValueError(f"profile is {profile!r}; expected a name such as 'cpu' or 'h200' (letters, digits, - and _)")
    return profile


def data_dir(profile: str) -> Path:
    """`data/<profile>`: result rows that notebooks wrote with this profile."""
    return project_root() / "data" / check_profile(profile)


def reference_dir() -> Path:
    """`data/reference`: published numbers of others, with their own README."""
    return project_root() / "data" / "reference"


def figures_dir(profile: str) -> Path:
    """`figures/<profile>`: rendered figures and the HTML report of this profile."""
    return project_root() / "figures" / check_profile(profile)


def build_dir(profile: str) -> Path:
    """`build/<profile>`: executed copies of notebooks and what the runner notes about each run."""
    return project_root() / "build" / check_profile(profile)
