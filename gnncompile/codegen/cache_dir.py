"""Where generated sources and built kernels are kept between processes: one private folder per user."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

VARIABLE = "GNNCOMPILE_CACHE_DIR"


def cache_dir() -> Path:
    """The cache folder: ``$GNNCOMPILE_CACHE_DIR``, else ``~/.cache/gnncompile``; made with mode 0700.

    What lies in it is executed, so a folder that belongs to someone else, that others may write, or that this process
    can't write is not used: this process then gets a fresh temporary folder.
    """
    return _open(os.environ.get(VARIABLE) or str(Path("~").expanduser() / ".cache" / "gnncompile"))


@lru_cache(maxsize=8)
def _open(name: str) -> Path:
    path = Path(name).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _private(path):
            return path
    except OSError:
        pass  # a read-only home folder: the same answer as for a folder that isn't ours
    return Path(tempfile.mkdtemp(prefix="gnncompile-"))


def _private(path: Path) -> bool:
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        return False
    if not hasattr(os, "getuid"):
        return True  # Windows: the profile folder is private to the user
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
