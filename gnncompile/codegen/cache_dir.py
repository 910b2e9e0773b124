"""Where generated sources and built kernels are kept between processes: one private folder per user."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

VARIABLE = "GNNCOMPILE_CACHE_DIR"


def cache_dir() -> Path:
    """The cache folder, :func:`chosen`, made with mode 0700.

    What lies in it is executed, so a folder that belongs to someone else, that others may write, or that this process
    can't write is not used: this process then gets a fresh temporary folder.
    """
    return _open(str(chosen()))


def chosen() -> Path:
    """The folder that is asked for, there or not: ``$GNNCOMPILE_CACHE_DIR``, else ``~/.cache/gnncompile``."""
    return Path(os.environ.get(VARIABLE) or Path("~").expanduser() / ".cache" / "gnncompile").absolute()


def why_unusable(path: Path) -> str:
    """Makes the folder if it is not there; why it can't be used, or nothing if it can."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            return "this user can't write to it"
        if not hasattr(os, "getuid"):
            return ""  # Windows: the profile folder is private to the user
        status = path.stat()
    except OSError as error:  # a read-only home folder: the same answer as for a folder that isn't ours
        return f"it can't be made: {error.strerror or error}"
    if status.st_uid != os.getuid():
        return f"it belongs to another user, {status.st_uid}"
    return "others may write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


@lru_cache(maxsize=8)
def _open(name: str) -> Path:
    path = Path(name)
    return Path(tempfile.mkdtemp(prefix="gnncompile-")) if why_unusable(path) else path
