"""fmms.paths and fmms.atomic: the project's folders are found, files are whole or as they were."""

import os
import threading

import pytest

from fmms import atomic, paths


@pytest.fixture(autouse=True)
def _no_named_root(monkeypatch):
    monkeypatch.delenv("FMMS_ROOT", raising=False)


def test_root_is_found_upward_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "notebooks" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks" / "deep")
    assert paths.project_root() == tmp_path.resolve()
    assert paths.data_dir("cpu") == tmp_path.resolve() / "data" / "cpu"
    assert paths.figures_dir("h200") == tmp_path.resolve() / "figures" / "h200"
    assert paths.build_dir("cpu") == tmp_path.resolve() / "build" / "cpu"


def test_environment_decides(tmp_path, monkeypatch):
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    assert paths.project_root() == tmp_path.resolve()
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="FMMS_ROOT"):
        paths.project_root()


def test_no_project_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "site" / "fmms" / "paths.py"))
    with pytest.raises(FileNotFoundError, match="set FMMS_ROOT"):
        paths.project_root()


@pytest.mark.parametrize("profile", ["", "../x", "a/b", ".hidden", None])
def test_profile_must_be_a_folder_name(profile):
    with pytest.raises(ValueError, match="profile is"):
        paths.data_dir(profile)


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "new" / "a.csv"
    atomic.write_text(path, "old")
    with pytest.raises(RuntimeError), atomic.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["a.csv"]


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "a.txt"
    contents = {letter * 200_000 for letter in "ab"}
    atomic.write_text(path, "a" * 200_000)
    stop = threading.Event()
    seen = set()

    def read():
        while not stop.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for letter in "ab" * 20:
        atomic.write_text(path, letter * 200_000)
    stop.set()
    reader.join()
    assert seen <= contents


def test_written_files_follow_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        path = atomic.write_bytes(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
