"""Turns the text of a generated Triton module into a module, and keeps the text in the cache folder."""

from __future__ import annotations

import hashlib
import linecache
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import triton

from gnncompile.codegen.cache_dir import cache_dir, chosen, give_up


def load_module(text: str) -> ModuleType:
    """Executes a generated module and returns it. The code comes from `text`, never from the file in the cache folder.

    The file is for debuggers and profilers. Triton reads a kernel's source through ``linecache``, as tracebacks do.
    """
    digest = hashlib.sha256(f"{triton.__version__}\n{text}".encode()).hexdigest()
    path = Path("triton") / f"region_{digest[:32]}.py"
    try:
        path = cache_dir() / path
        _keep(path, text)
    except OSError as error:
        give_up(chosen(), error.strerror or str(error))
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    # The None in place of a modification time keeps linecache from comparing this entry with the file.
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def _keep(path: Path, text: str) -> None:
    """Writes a file completely or not at all, since other processes may write and read it at the same time."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.exists() and path.read_bytes() == text.encode():
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")  # with mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
