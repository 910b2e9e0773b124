"""Where generated sources and built kernels are kept between processes: one private folder per user.

What lies there is executed. So a folder, or a file in it, is used only if it belongs to this user and nobody else may
write to it; everything is written with modes 0700 and 0600; and nothing is read that does not have the bytes that its
checksum names. Where that can't be had, or the disk is full, a warning says so and a temporary folder of this process
takes its place.
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

VARIABLE = "GNNCOMPILE_CACHE_DIR"

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """The cache folder, :func:`chosen`, made with mode 0700.

    Where it can't be used, since it belongs to someone else, others may write to it, or this process can't, a warning
    says so, and it is :func:`temporary_dir`.

    Raises:
        OSError: That can't be made either.
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
    """The folder that is asked for, there or not: ``$GNNCOMPILE_CACHE_DIR``, else ``~/.cache/gnncompile``."""
    return Path(os.environ.get(VARIABLE) or Path("~").expanduser() / ".cache" / "gnncompile").absolute()


def why_unusable(path: Path) -> str:
    """Makes the folder if it is not there; why it can't be used, or nothing if it can."""
    try:
        _make(path)
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            return "this user can't write to it"
        return _whose(path.stat()) or _open_ancestor(path)
    except OSError as error:  # a read-only home folder: the same answer as for a folder that isn't ours
        return f"it can't be made: {error.strerror or error}"


def who_writes(handle: int) -> str:
    """Who beside this user may write to an open file, or nothing if nobody may."""
    return _whose(os.fstat(handle))


def temporary_dir() -> Path:
    """A private folder of this process, removed when it ends.

    Raises:
        OSError: It can't be made.
    """
    with _lock:
        known = _temporary.get(os.getpid())
        if known is None:
            known = _temporary[os.getpid()] = Path(tempfile.mkdtemp(prefix="gnncompile-"))
            atexit.register(_remove, os.getpid(), known)
        return known


def give_up(path: Path, problem: str) -> None:
    """Says, once, why a folder is not used by this process from now on."""
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
"""By process: a forked one must not use what its parent will remove."""
_lock = threading.Lock()


def _whose(status: os.stat_result) -> str:
    """Who beside this user may write to a file or folder, or nothing if nobody may."""
    if not hasattr(os, "getuid"):
        return ""  # Windows: the profile folder is private to the user
    if status.st_uid != os.getuid():
        return f"it belongs to another user, {status.st_uid}"
    return "others may write to it" if status.st_mode & _OTHERS_WRITE else ""


def _open_ancestor(path: Path) -> str:
    """That others may put something else in the place of a folder above, where they may."""
    if not hasattr(os, "getuid"):
        return ""
    for folder in path.resolve().parents:
        status = folder.stat()
        if status.st_mode & stat.S_ISVTX:  # as of /tmp: nobody may rename what belongs to others
            continue
        if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)):
            return f"others may write to {folder}"
    return ""


def _is_own_group(group: int) -> bool:
    """Whether a group is the one that many systems give each user, who is alone in it."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _make(path: Path) -> None:
    """Makes a folder, and those above it that are not there, for this user alone."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)  # another process may have been faster


def _remove(process: int, folder: Path) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is not there any more may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
