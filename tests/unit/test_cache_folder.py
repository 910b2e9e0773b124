"""The folder of compiled kernels: private, never trusted blindly, and never the reason why a model does not run."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import py_compile
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gnncompile
from gnncompile.codegen import cache_dir
from gnncompile.codegen.cpp import compiler
from gnncompile.exc import UnsupportedRegion
from gnncompile.runtime import launch
from tests.harness import forget_kernels, light

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes of files as on Unix")


def returning(number: int) -> str:
    return f'extern "C" int run() {{ return {number}; }}'


def load(number: int = 7) -> ctypes.CDLL:
    """A kernel that returns a number: from the cache or compiled."""
    return compiler.load(returning(number), contract=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GNNCOMPILE_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache_dir, "_given_up", set())
    monkeypatch.setattr(cache_dir, "_temporary", {})
    yield folder
    forget_kernels()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where kernels were compiled to."""
    made: list[Path] = []
    original = compiler._build

    def build(*args: Any) -> None:
        made.append(args[-1])
        original(*args)

    monkeypatch.setattr(compiler, "_build", build)
    return made


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


# -- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_modes_are_private_whatever_the_umask(umask: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = cache / "a" / "b"
    monkeypatch.setenv("GNNCOMPILE_CACHE_DIR", str(nested))
    before = os.umask(umask)
    try:
        assert load().run() == 7
    finally:
        os.umask(before)
    assert len(list(nested.iterdir())) == 2
    for path in (cache, *cache.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_the_second_load_compiles_nothing(cache: Path, builds: list[Path]) -> None:
    assert [load().run(), load().run(), load(8).run()] == [7, 7, 8] and len(builds) == 2


# -- what is read -------------------------------------------------------------------------------------------------


def _swap(found: Path, other: Path) -> None:
    for suffix in (".so", ".sha256"):
        os.replace(other.with_suffix(suffix), found.with_suffix(suffix))


def _edit(suffix: str, change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def edit(found: Path, _: Path) -> None:
        file = found.with_suffix(suffix)
        content = change(file.read_bytes())
        file.unlink()  # a file that is loaded must not be changed where it is
        file.write_bytes(content)
        file.chmod(0o600)

    return edit


HARM: dict[str, Callable[[Path, Path], Any]] = {
    "another kernel and its checksum": _swap,
    "a kernel of another": lambda found, other: os.replace(other, found),
    "one byte": _edit(".so", lambda b: b[:-40] + bytes([b[-40] ^ 1]) + b[-39:]),
    "cut short": _edit(".so", lambda b: b[: len(b) // 2]),
    "empty": _edit(".so", lambda b: b""),
    "no checksum": lambda found, _: found.with_suffix(".sha256").unlink(),
    "empty checksum": _edit(".sha256", lambda b: b""),
    "a checksum that is no text": _edit(".sha256", lambda b: b"\xff" * 64),
    "group may write": lambda found, _: found.chmod(0o660),
    "others may write": lambda found, _: found.chmod(0o666),
    "others may write the checksum": lambda found, _: found.with_suffix(".sha256").chmod(0o602),
    "a folder": lambda found, _: (found.with_suffix(".sha256").unlink(), found.with_suffix(".sha256").mkdir()),
}


@pytest.mark.parametrize("harm", [name for name in HARM if name != "a folder"])
def test_what_is_not_as_written_is_not_loaded(harm: str, cache: Path, builds: list[Path]) -> None:
    load(8), load(7)
    other, found = builds
    HARM[harm](found, other)
    builds.clear()
    assert load(7).run() == 7 and builds == [found]
    assert load(7).run() == 7 and len(builds) == 1
    assert stat.S_IMODE(found.stat().st_mode) == 0o600


def test_a_checksum_that_can_not_be_replaced(cache: Path, builds: list[Path]) -> None:
    load(7)
    HARM["a folder"](builds[0], builds[0])
    with pytest.warns(RuntimeWarning, match="is not used: Is a directory"):
        assert load(7).run() == 7
    assert builds[-1].parent == cache_dir.temporary_dir()


def test_a_file_of_another_user(cache: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Told from its owner only: the folder is still ours."""
    load(7)
    monkeypatch.setattr(compiler, "who_writes", lambda handle: "it belongs to another user, 12345")
    assert load(7).run() == 7 and len(builds) == 2


def test_text_of_triton_kernels_is_not_taken_from_files(cache: Path) -> None:
    pytest.importorskip("triton")
    from gnncompile.codegen.triton.module import load_module

    text = "VALUE = 1\n"
    module = load_module(text)
    file = Path(str(module.__file__))
    assert file.read_text() == text and file.is_relative_to(cache) and stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("VALUE = 2\n")
    py_compile.compile(str(file))  # of the same size, and newer than its source
    assert load_module(text).VALUE == 1 and file.read_text() == text
    file.write_text("VALUE = 3\n")
    file.chmod(0o666)
    assert load_module(text).VALUE == 1 and file.read_text() == text and stat.S_IMODE(file.stat().st_mode) == 0o600


# -- folders that can't be used -----------------------------------------------------------------------------------


def _writable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    cache.chmod(0o770)


def _writable_above(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.chmod(0o707)


def _of_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    here = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: here + 1)


def _read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != cache and access(path, mode))


def _a_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("")


def _under_a_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.joinpath("file").write_text("")
    monkeypatch.setenv("GNNCOMPILE_CACHE_DIR", str(cache.parent / "file" / "cache"))


def _not_replaceable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: Any, target: Any) -> None:
        if Path(target).is_relative_to(cache):
            raise OSError(30, "Read-only file system")
        original(source, target)

    original = os.replace
    monkeypatch.setattr(os, "replace", replace)


UNUSABLE: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "others may write": (_writable, "others may write to it"),
    "others may write above": (_writable_above, "others may write to /.*"),
    "another user's": (_of_another, "it belongs to another user"),
    "read-only": (_read_only, "this user can't write to it"),
    "a file": (_a_file, "this user can't write to it"),
    "under a file": (_under_a_file, "it can't be made: Not a directory"),
    "read-only since": (_not_replaceable, "Read-only file system"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_folder_that_can_not_be_used(case: str, cache: Path, builds: list[Path], monkeypatch: Any) -> None:
    break_it, problem = UNUSABLE[case]
    break_it(cache, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"cache folder .* is not used: {problem}.*GNNCOMPILE_CACHE") as said:
        found = compiler.load(returning(7), contract=True)
        assert load(8).run() == 8
    monkeypatch.undo()
    assert found.run() == 7 and len(said) == 1
    (used,) = {path.parent for path in builds if not path.is_relative_to(cache)}
    assert used != cache and stat.S_IMODE(used.stat().st_mode) == 0o700
    assert not cache.is_dir() or not [path for path in cache.rglob("*") if path.is_file()]


FULL = 'case "$PWD" in {0}/*) echo "fatal error: error writing to x.s: No space left on device" >&2; exit 1;; esac'


def test_a_full_disk(cache: Path, builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiler.compiler()[0]
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", f'{FULL.format(cache)}\nexec {real} "$@"'))
    with pytest.warns(RuntimeWarning, match="is not used: No space left on device") as said:
        assert (load(7).run(), load(8).run()) == (7, 8)
    assert len(said) == 1 and [path.parent == cache for path in builds] == [True, False, False]
    assert not list(cache.iterdir())


def test_no_space_anywhere_is_a_reported_fallback(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", FULL.format("")))
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(UnsupportedRegion, match=r"kept in any folder .*free some space"),
    ):
        load()
    x, row, col = torch.randn(4, 3), torch.tensor([0, 3, 1]), torch.tensor([2, 2, 0])

    def model(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, col, x[row].sin())

    with light("cpp"):
        compiled = gnncompile.compile(model)
        torch.testing.assert_close(compiled(x, row, col), model(x, row, col))
        (reason,) = set(launch.fallbacks.values())
        assert "No space left" in reason and "slow reference interpreter" in caplog.text
        assert "reference" in str(gnncompile.explain(compiled, x, row, col))


def test_no_temporary_folder_either(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **kwargs: Any) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    cache.write_text("")
    monkeypatch.setattr(cache_dir.tempfile, "mkdtemp", none)
    with pytest.warns(RuntimeWarning), pytest.raises(UnsupportedRegion, match="No usable temporary directory"):
        load()


# -- several processes --------------------------------------------------------------------------------------------


def _in_child(work: Callable[[], Any]) -> Any:
    """What a forked process finds; it has the parent's memory and none of its threads."""
    context = multiprocessing.get_context("fork")
    queue: Any = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(work()))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    return queue.get()


def test_temporary_folders_belong_to_one_process_and_go_with_it(cache: Path) -> None:
    ours = cache_dir.temporary_dir()
    theirs = _in_child(cache_dir.temporary_dir)
    assert ours == cache_dir.temporary_dir() and theirs != ours and ours.is_dir()
    cache_dir._remove(os.getpid() + 1, ours)
    assert ours.is_dir()
    cache_dir._remove(os.getpid(), ours)
    assert not ours.is_dir()


def test_processes_that_compile_the_same_kernel_at_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.SimpleQueue()

    def work() -> None:
        barrier.wait(30)
        queue.put([load(number).run() for number in (7, 8)])

    children = [context.Process(target=work) for _ in range(4)]
    for child in children:
        child.start()
    found = [queue.get() for _ in children]
    for child in children:
        child.join(60)
    assert found == [[7, 8]] * 4 and [child.exitcode for child in children] == [0] * 4
    assert sorted(path.suffix for path in cache.iterdir()) == [".sha256"] * 2 + [".so"] * 2
    assert all(map(compiler._intact, cache.glob("*.so")))


@pytest.mark.parametrize("when", ["while it compiles", "between kernel and checksum"])
def test_a_compile_that_is_killed(
    when: str, cache: Path, tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    real = compiler.compiler()[0]
    text = f'for a in "$@"; do [ "$a" = -shared ] && touch {begun} && exec sleep 60; done\nexec {real} "$@"'
    slow = script(tmp_path / "cxx", text)
    context = multiprocessing.get_context("fork")

    def work() -> None:
        os.setsid()
        if when == "while it compiles":
            os.environ["CXX"] = slow
        else:
            replace = os.replace

            def stop(source: Any, target: Any) -> None:
                if str(target).endswith(".sha256"):
                    begun.touch()
                    time.sleep(60)
                replace(source, target)

            os.replace = stop
        load()

    child = context.Process(target=work)
    child.start()
    for _ in range(600):
        if begun.exists():
            break
        time.sleep(0.05)
    assert begun.exists() and child.pid is not None
    os.killpg(child.pid, signal.SIGKILL)
    child.join(30)
    assert child.exitcode == -signal.SIGKILL and list(cache.glob("build-*"))
    assert load().run() == 7 and len(builds) == 1
    builds.clear()
    assert load().run() == 7 and not builds
    assert subprocess.run(["find", str(cache), "-perm", "/022"], capture_output=True, check=True).stdout == b""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
def test_flags_that_a_compiler_does_not_know_are_left_out(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = 'case "$*" in *-mmove-max*) echo "unknown argument" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", f'{old}\nexec {compiler.compiler()[0]} "$@"'))
    assert not set(compiler.WIDE_MOVES) & set(compiler.kernel_flags(True))
    assert load(11).run() == 11


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
def test_arrays_are_copied_by_whole_registers(cache: Path, tmp_path: Path):
    """Else a CPU waits between a store of half a register and a load of the whole."""
    flags = [*compiler.kernel_flags(True), "-march=x86-64-v4", "-mtune=icelake-server"]
    if not set(compiler.WIDE_MOVES) <= set(flags):
        pytest.skip("the compiler is older than gcc 12, or another one")
    source = "struct Row { float of[64]; }; void copy(Row *to, const Row *from) { *to = *from; }"

    def assembly(flags: list[str]) -> str:
        command = [*compiler.compiler(), *flags, "-x", "c++", "-S", "-o", "-", "-"]
        return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout

    wide, usual = assembly(flags), assembly([flag for flag in flags if flag not in compiler.WIDE_MOVES])
    assert "%zmm" in wide and "%ymm" not in wide and "%ymm" in usual
