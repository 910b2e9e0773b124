"""The C++ extension that does the host's work of a replay (replay.cpp).

It is built in the background when the first model is recorded. Until it is built, and where it can't be built,
:mod:`gnncompile.cudagraphs.recorder` does the same in Python.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import ModuleType

from gnncompile import _compat
from gnncompile.codegen.cpp.compiler import load_module
from gnncompile.exc import UnsupportedRegion
from gnncompile.forks import after_fork

logger = logging.getLogger(__name__)

NAME = "gnncompile_replay"

_SOURCE = Path(__file__).with_name("replay.cpp")


class _Build:
    """The only attempt of a process to build the extension."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self.problem = ""
        self.thread: threading.Thread | None = None

    def run(self) -> None:
        try:
            source = _SOURCE.read_text(encoding="utf-8")
            self.module = load_module(NAME, source, _compat.extension_flags(), _compat.extension_libraries())
        except (UnsupportedRegion, ImportError, OSError) as error:
            self.problem = str(error)
            logger.info("recordings are replayed by Python: %s", error)


_build = _Build()
_lock = threading.Lock()


def prepare() -> None:
    """Starts to build the extension, unless the build has begun. This takes half a minute, once on a machine."""
    with _lock:
        if _build.thread is None:
            _build.thread = threading.Thread(target=_build.run, name="gnncompile-native", daemon=True)
            _build.thread.start()


def module() -> ModuleType | None:
    """Returns the extension, or None if it is not built yet."""
    return _build.module


def begun() -> bool:
    """Whether the build of the extension has begun."""
    return _build.thread is not None


def wait() -> str:
    """Waits for the build. Returns why there is no extension, or an empty string if there is one."""
    prepare()
    assert _build.thread is not None
    _build.thread.join()
    return _build.problem


@after_fork
def _after_fork() -> None:
    """Forgets an unfinished build: a forked process does not have the thread of the build."""
    global _build, _lock
    _lock = threading.Lock()
    if _build.module is None and not _build.problem:
        _build = _Build()
