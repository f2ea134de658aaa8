"""Writes a file so that a reader, or a kill at any moment, finds the old content or the new, never a part.

Leaves the choice of place to fmms.paths and of content to the caller.
"""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path):
    """Yields a temporary path in the folder of `path`; on a normal exit that file takes the place of `path`.

    The suffix is kept, because writers such as matplotlib choose a format by it. After an exception `path` is as it
    was and the temporary file is gone. Missing parent folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Same folder, hence same filesystem: only there is os.replace one step.
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=f".tmp{path.suffix}", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _sync(temporary)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's 0600 would keep colleagues from reading results
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Writes `content` to `path` in one step; returns the path."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def write_text(path: str | Path, content: str) -> Path:
    """Writes `content` to `path` as UTF-8 with its newlines as they are, in one step; returns the path."""
    return write_bytes(path, content.encode("utf-8"))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
