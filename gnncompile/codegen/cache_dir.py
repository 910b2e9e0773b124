"""The folder that keeps generated sources and built kernels between processes: one private folder per user.

Files in the folder are executed. So a folder or a file is used only if it belongs to this user, and nobody else may
write to it. Folders are made with mode 0700 and files with mode 0600, and a shared object must match its checksum.
If the folder can't be used, or its disk is full, a warning says so. A temporary folder of this process then takes its
place.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import threading
import warnings
from pathlib import Path

from gnncompile.forks import after_fork

VARIABLE = "GNNCOMPILE_CACHE_DIR"

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """Returns the cache folder, :func:`chosen`; makes it with mode 0700 if it does not exist.

    The folder can't be used if it belongs to another user, if others may write to it, or if this process may not. Then
    a warning says so, and the result is :func:`temporary_dir`.

    Raises:
        OSError: The temporary folder can't be made either.
    """
    path = chosen()
    if path in _given_up:
        return temporary_dir()
    problem = why_unusable(path)
    if not problem:
        return path
    give_up(path, problem)
    return temporary_dir()


def chosen() -> Path:
    """Returns the configured folder, which may not exist: ``$GNNCOMPILE_CACHE_DIR``, else ``~/.cache/gnncompile``."""
    return Path(os.environ.get(VARIABLE) or Path("~").expanduser() / ".cache" / "gnncompile").absolute()


def why_unusable(path: Path) -> str:
    """Makes the folder if it does not exist; returns the reason why it can't be used, or ``""`` if it can."""
    try:
        _make(path)
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            return "this user can't write to it"
        return _whose(path.stat()) or _open_ancestor(path)
    except OSError as error:  # a read-only home folder: the same answer as for a folder that isn't ours
        return f"it can't be made: {error.strerror or error}"


def who_writes(handle: int) -> str:
    """Returns a message if anyone but this user may write to an open file, else ``""``."""
    return _whose(os.fstat(handle))


def temporary_dir() -> Path:
    """Returns a private folder of this process, which is removed when the process ends.

    Raises:
        OSError: The folder can't be made.
    """
    with _lock:
        known = _temporary.get(os.getpid())
        if known is None:
            known = _temporary[os.getpid()] = Path(tempfile.mkdtemp(prefix="gnncompile-"))
            atexit.register(_remove, os.getpid(), known)
        return known


def give_up(path: Path, problem: str) -> None:
    """Marks a folder as unusable for this process, and warns once with the reason."""
    with _lock:
        if path in _given_up:
            return
        _given_up.add(path)
    warnings.warn(
        f"gnncompile: the cache folder {path} is not used: {problem}. This process keeps its kernels in a temporary "
        f"folder. Set {VARIABLE} to a folder of this user alone (mode 700), with some space.",
        RuntimeWarning,
        stacklevel=2,
    )


_given_up: set[Path] = set()
_temporary: dict[int, Path] = {}
"""Process id to temporary folder. A forked process must not use the folder that its parent will remove."""
_lock = threading.Lock()


def _whose(status: os.stat_result) -> str:
    """Returns a message if anyone but this user may write to a file or folder, else ``""``."""
    if not hasattr(os, "getuid"):
        return ""  # Windows: the profile folder is private to the user
    if status.st_uid != os.getuid():
        return f"it belongs to another user, {status.st_uid}"
    return "others may write to it" if status.st_mode & _OTHERS_WRITE else ""


def _open_ancestor(path: Path) -> str:
    """Returns a message if others may write to a parent folder, and so replace this folder; else ``""``."""
    if not hasattr(os, "getuid"):
        return ""
    for folder in path.resolve().parents:
        status = folder.stat()
        if status.st_mode & stat.S_ISVTX:  # sticky, like /tmp: nobody may rename another user's folder
            continue
        if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)):
            return f"others may write to {folder}"
    return ""


def _is_own_group(group: int) -> bool:
    """Whether a group is this user's private group, which many systems make for each user."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _make(path: Path) -> None:
    """Makes a folder and its missing parents, with access for this user only."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)  # another process may have been faster


def _remove(process: int, folder: Path) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


@after_fork
def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the old lock may be held by a thread that the fork did not copy
