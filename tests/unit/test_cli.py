"""`python -m gnncompile`: what it finds in environments that are broken on purpose, and its exit statuses."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gnncompile
from gnncompile.cli import doctor, machine, packages, trials
from gnncompile.cli.finding import NOTE, OK, SLOW, WRONG, Finding
from gnncompile.cli.main import main
from gnncompile.cli.probe import probe
from gnncompile.cli.trials import Trial
from gnncompile.codegen import cache_dir
from gnncompile.codegen.cpp import compiler
from gnncompile.cudagraphs import native
from gnncompile.runtime import launch
from gnncompile.support import table
from gnncompile.support.case import Absent
from tests.harness import forget_kernels, kernels

ROOT = Path(__file__).resolve().parents[2]


def script(path: Path, text: str) -> str:
    """A program for the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def only(findings: Any, name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


# -- the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["nope"], ["cache"], ["cache", "drop"], ["explain"], ["doctor", "--nope"]])
def test_a_wrong_command_line_has_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: python -m gnncompile" in capsys.readouterr().err


# -- cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GNNCOMPILE_CACHE_DIR", str(folder))
    yield folder
    forget_kernels()


def test_cache_holds_what_was_compiled_and_loses_only_that(cache: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["cache", "info"]) == 0
    assert "not there yet" in capsys.readouterr().out and not cache.exists()

    compiler.load('extern "C" int run() { return 7; }', contract=True)
    triton, region = cache / "triton", f"region_{'a1' * 16}"
    (triton / "__pycache__").mkdir(parents=True)
    (cache / "build-0abc").mkdir()
    ours = (triton / f"{region}.py", triton / "__pycache__" / f"{region}.cpython-311.pyc", triton / f"{region}x9.tmp")
    for file in (*ours, cache / "build-0abc" / "kernel.o"):
        file.write_text("12345")
    strangers = [cache / "libmine.so", cache / "notes.txt", triton / "mine.py", cache / "build-0abc" / "mine.o"]
    for file in strangers:
        file.write_text("mine")
    before = {path for path in cache.rglob("*") if path.is_file()}

    assert main(["cache", "info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {path for path in cache.rglob("*") if path.is_file()} == before
    assert {name: kind["count"] for name, kind in facts["kinds"].items()} == {
        "C++ kernels": 1,
        "Triton sources": 1,
        "leftovers": 2,
    }
    assert facts["kinds"]["Triton sources"]["bytes"] == 10 and facts["kinds"]["C++ kernels"]["bytes"] > 1000
    assert facts["other_files"] == len(strangers)

    assert main(["cache", "clear"]) == 0
    assert "left alone" in capsys.readouterr().out
    assert sorted(path for path in cache.rglob("*") if path.is_file()) == sorted(strangers)
    assert compiler.load('extern "C" int run() { return 7; }', contract=True).run() == 7
    for file in strangers:
        file.unlink()
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_removed"] == [] and not list(cache.iterdir())


def test_cache_that_others_may_write_is_wrong_and_not_used(cache: Path, capsys: pytest.CaptureFixture[str]):
    cache.mkdir()
    cache.chmod(0o777)
    assert main(["cache", "info"]) == 1
    assert "others may write to it" in capsys.readouterr().out
    assert cache_dir.cache_dir() != cache
    found = machine.cache_folder()
    assert found.level == SLOW and "GNNCOMPILE_CACHE_DIR" in found.remedy


def test_cache_folder_that_is_a_file(cache: Path):
    cache.write_text("")
    assert machine.cache_folder().level == SLOW
    cache.unlink()
    assert machine.cache_folder() == Finding("cache folder", OK, str(cache))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "LEAST_FREE", 2**70)
    assert machine.cache_folder().level == WRONG


# -- doctor: what is installed ------------------------------------------------------------------------------------


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions to be found, instead of those installed; None: not installed."""
    pytest.importorskip("packaging")
    if packages.installed("gnncompile") is None:
        pytest.skip("gnncompile is not installed (run from the checkout)")
    changed: dict[str, str | None] = {}
    real = packages.installed
    monkeypatch.setattr(packages, "installed", lambda name: changed.get(name, real(name)))
    return changed


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("torch-geometric", "2.5.3", WRONG),
        ("torch-geometric", "2.7.0", OK),
        ("torch", "2.10.0+cu128", WRONG),
        ("torch", "2.13.0+cpu", OK),
        ("torch", "2.14.1a0+git1234", OK),
        ("torch", "2.15.0+cu132", OK),
        ("torch", "2.16.0", WRONG),
        ("networkx", None, WRONG),
        ("torch-scatter", None, NOTE),
        ("pymetis", None, NOTE),
    ],
)
def test_versions(versions: dict[str, str | None], name: str, version: str | None, level: str):
    versions[name] = version
    found = only(packages.packages(), name)
    assert found.level == level
    assert ("pip install" in found.remedy) == (level == WRONG)
    assert found.is_bad == (level == WRONG)


def test_torch_scatter_of_another_torch(versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch):
    versions["torch-scatter"] = "2.1.2"
    monkeypatch.setitem(sys.modules, "torch_scatter", None)  # importing it raises an ImportError
    found = [finding for finding in packages.packages() if finding.name == "torch-scatter"]
    assert found[-1].level == WRONG and "another torch" in found[-1].found


@pytest.mark.parametrize(
    ("found", "gpu", "level"),
    [
        ("3.6.0", True, OK),
        ("3.1.0", True, WRONG),
        (None, True, WRONG),
        ("3.1.0", False, OK),
        (None, False, NOTE),
    ],
)
def test_triton_is_the_one_that_torch_asks_for(monkeypatch: pytest.MonkeyPatch, found: Any, gpu: bool, level: str):
    needs = ["filelock", "triton==3.6.0; python_version > '3'", "opt-einsum; extra == 'opt-einsum'"]
    monkeypatch.setattr(packages, "requires", lambda name: needs)
    monkeypatch.setattr(packages, "installed", lambda name: found)
    assert packages.triton(gpu).level == level


# -- doctor: the machine ------------------------------------------------------------------------------------------


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = machine.cpp_compiler()
    assert found.level == SLOW and "reference interpreter" in found.found and "install g++" in found.remedy


def test_compiler_that_is_not_there_or_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script(tmp_path / "g++", "echo good 1.0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setenv("CXX", "nope-17 --fast")
    found = machine.cpp_compiler()
    assert found.level == WRONG and "nope-17" in found.found and "unset" in found.remedy
    monkeypatch.setenv("CXX", "")
    assert machine.cpp_compiler() == Finding("C++ compiler", OK, "g++: good 1.0")
    monkeypatch.setenv("CXX", script(tmp_path / "broken", "echo no licence >&2; exit 3"))
    found = machine.cpp_compiler()
    assert found.level == WRONG and "no licence" in found.found


def test_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script(tmp_path / "nvidia-smi", "exit 9")
    assert machine.gpu().level == NOTE
    script(tmp_path / "nvidia-smi", "echo 'GPU 0: NVIDIA T4 (UUID: 1)'")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = machine.gpu()
    assert found.level == SLOW and "GPU 0: NVIDIA T4, but torch" in found.found and "CUDA build" in found.remedy
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "driver" in machine.gpu().remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA P100")
    for capability, level in (((6, 0), WRONG), ((7, 0), OK), ((10, 0), OK)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert machine.gpu().level == level


def test_threads(monkeypatch: pytest.MonkeyPatch):
    for used, level in ((4096, SLOW), (1, None)):
        monkeypatch.setattr(torch, "get_num_threads", lambda used=used: used)
        found = machine.threads()
        assert found.level == level or (level is None and not found.is_bad)


@pytest.mark.parametrize(
    ("name", "value", "gpu", "level"),
    [
        ("TORCHDYNAMO_DISABLE", "1", False, SLOW),
        ("TORCHDYNAMO_DISABLE", "0", False, None),
        ("TRITON_INTERPRET", "1", True, SLOW),
        ("TRITON_INTERPRET", "1", False, None),
        ("GNNCOMPILE_KERNELS", "reference", True, SLOW),
        ("GNNCOMPILE_KERNELS", "triton", False, SLOW),
        ("GNNCOMPILE_KERNELS", "triton", True, None),
        ("GNNCOMPILE_KERNELS", "c++", False, WRONG),
    ],
)
def test_environment_variables(monkeypatch: pytest.MonkeyPatch, name: str, value: str, gpu: bool, level: str | None):
    for variable in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TRITON_INTERPRET", "GNNCOMPILE_KERNELS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    assert [(finding.name, finding.level) for finding in machine.environment(gpu)] == [(name, level)] * bool(level)


# -- doctor: what works -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["cpp", "reference"])
def test_a_probe_compiles_runs_and_compares(which: str):
    with kernels(which):
        found = probe(which, "cpu")
    assert found["ok"] and found["seconds"] > 0


def test_a_probe_sees_wrong_numbers_and_fallbacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    right = launch.reference.run
    with kernels("reference"):
        monkeypatch.setattr(launch.reference, "run", lambda *given: [1.01 * value for value in right(*given)])
        assert "wrong numbers" in probe("reference", "cpu")["message"]
    monkeypatch.setattr(launch.reference, "run", right)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with kernels("cpp"):
        found = probe("cpp", "cpu")
    assert not found["ok"] and "no C++ compiler found" in found["message"]
    monkeypatch.setattr(native, "_build", native._Build())
    found = probe("native", "cpu")
    assert not found["ok"] and "no C++ compiler found" in found["message"]


def test_a_trial_is_a_process_with_an_empty_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CXX", script(tmp_path / "broken", 'echo "Python.h: No such file" >&2; exit 1'))
    trial = trials.trials(gpu=False, model=False)[0]
    (found,) = trials.run([trial])
    assert (found.name, found.level) == ("kernel, C++", SLOW)
    assert "Python.h" in found.found and "python3-dev" in found.remedy
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill -SEGV $$", "ended by signal 11"),
        ("echo first >&2; echo last >&2; exit 3", "exit status 3: last"),
        ("exec sleep 60", "not done after 0.2 s"),
        ('echo chatter; echo \'{"ok": true, "message": "", "seconds": 1.5}\'', "compiled and run in 1.5 s"),
    ],
)
def test_a_trial_that_dies_or_hangs_is_a_finding(text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", text))
    monkeypatch.setattr(trials, "LIMIT", 0.2 if "sleep" in text else 60)
    found = list(trials.run([Trial("one", "model", "cpu"), Trial("two", "cpp", "cpu", NOTE)]))
    good = "chatter" in text
    assert [(one.name, one.level) for one in found] == [("one", OK if good else WRONG), ("two", OK if good else NOTE)]
    assert all(said in one.found and bool(one.remedy) != good for one in found)


def test_what_is_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trials, "installed", lambda name: None)
    assert [(trial.what, trial.device) for trial in trials.trials(gpu=False, model=True)] == [
        ("cpp", "cpu"),
        ("reference", "cpu"),
        ("model", "cpu"),
    ]
    assert [(trial.what, trial.device) for trial in trials.trials(gpu=True, model=True)][2:] == [
        ("triton", "cuda"),
        ("native", "cpu"),
        ("model", "cpu"),
        ("model", "cuda"),
    ]


@pytest.mark.parametrize("level", [OK, NOTE, SLOW, WRONG])
def test_doctor_status(level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    good = Finding("Python", OK, "3.12")
    monkeypatch.setattr(doctor, "examine", lambda model: iter([good, Finding("thing", level, "so", "do this")]))
    status = int(level in (SLOW, WRONG))
    assert main(["doctor"]) == status
    assert "-> do this" in capsys.readouterr().out
    assert main(["doctor", "--json", "--quick"]) == status
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] == (status == 0)
    assert said["findings"][1] == {"name": "thing", "level": level, "found": "so", "remedy": "do this"}


def test_doctor_speaks_where_gnncompile_cannot_be_imported(tmp_path: Path):
    for name, text in (
        ("torch_geometric/__init__.py", "__version__ = '2.3.0'\n"),
        ("torch_geometric-2.3.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch-geometric\nVersion: 2.3.0\n"),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment["GNNCOMPILE_CACHE_DIR"] = str(tmp_path / "cache")

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    done = python("-m", "gnncompile", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert findings["import gnncompile"]["level"] == WRONG
    if packages.installed("gnncompile") is not None:
        assert findings["torch-geometric"]["level"] == WRONG
    done = python("-c", "from gnncompile import compile")
    assert "ImportError: gnncompile.compile: " in done.stderr and "python -m gnncompile doctor" in done.stderr


def test_names_that_are_not_there():
    assert gnncompile.import_error is None
    with pytest.raises(AttributeError, match="nope"):
        gnncompile.nope  # noqa: B018


# -- explain ------------------------------------------------------------------------------------------------------

MODELS = """
import dataclasses
import torch
import gnncompile
from neighbour import add

print("chatter")

@dataclasses.dataclass
class Kept:
    model: object

def whole(x, edge_index):
    return torch.zeros_like(x).index_add(0, edge_index[1], add(x[edge_index[0]]))

def broken(x, edge_index):
    torch._dynamo.graph_break()
    return whole(x, edge_index)

def light(function):
    return gnncompile.compile(function, options={"inductor": False})

model = light(whole)
kept = Kept(light(broken))
number = 3
inputs = (torch.randn(5, 2), torch.tensor([[0, 1, 4, 1], [2, 2, 2, 0]]))

def keywords():
    return {"edge_index": inputs[1], "x": inputs[0]}

def one():
    return inputs[0]

if __name__ == "__main__":
    raise RuntimeError("run as a script")
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script beside a module that it imports; its name is that of a module which is imported already."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour.py").write_text("def add(x):\n    return x + 1\n")
    path = tmp_path / "json.py"
    path.write_text(MODELS)
    yield str(path)
    sys.modules.pop("neighbour", None)


def test_explain(models: str, capsys: pytest.CaptureFixture[str]):
    launch.fallbacks.clear()
    assert main(["explain", f"{models}:model"]) == 0
    assert "1 regions" in capsys.readouterr().out
    assert main(["explain", f"{models}:light(whole)", "--json"]) == 2
    assert main(["explain", f"{models}:model", "--json", "--inputs", "keywords()"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["captured_graphs"] == len(report["regions"]) == 1 and report["forward"] is None
    page, picture = (Path(models).with_suffix(suffix) for suffix in (".html", ".svg"))
    more = ["--measure", "--html", str(page), "--draw", str(picture), "--json"]
    assert main(["explain", f"{models}:model", *more]) == 0
    assert json.loads(capsys.readouterr().out)["forward"] > 0
    assert "<html" in page.read_text() and "<svg" in picture.read_text()
    assert main(["explain", f"{models}:kept.model", "--inputs", f"{models}:inputs"]) == 1
    assert "captured graphs 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}"], "expected script.py:name"),
        (["{}:nope"], "has no 'nope'"),
        (["{}:number"], "is a int, expected a module or a function"),
        (["{}:number()"], "can't be called"),
        (["{}:model", "--inputs", "nope"], "has no 'nope'; define it there"),
        (["nope.py:model"], "no file nope.py"),
        (["nope_nope:model"], "no module 'nope_nope'"),
        (["gnncompile.nope:model"], "no module 'gnncompile.nope'"),
        (["torch_geometric.nn:global_add_pool"], "has no 'inputs'"),
    ],
)
def test_explain_of_what_is_not_there(models: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", *(argument.format(models) for argument in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_errors_of_the_script_are_its_own(tmp_path: Path):
    (tmp_path / "broken_script.py").write_text("import nope_nope\n")
    with pytest.raises(ModuleNotFoundError, match="nope_nope"):
        main(["explain", f"{tmp_path / 'broken_script.py'}:model"])


# -- support ------------------------------------------------------------------------------------------------------


def test_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    cases = tuple(case for case in table.SECTIONS["conv"] if case.name == "SimpleConv")
    monkeypatch.setattr(table, "SECTIONS", {"conv": (*cases, Absent("Nope", "not there"))})
    out = tmp_path / "docs" / "support.md"
    assert main(["support", "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    results = json.loads(said.out)["conv"]
    assert results[0]["graphs"] == 1 and results[1] == {"name": "Nope", "why": "not there"}
    page = table.rows_of(out.read_text())
    assert list(page) == ["SimpleConv", "Nope"] and page["SimpleConv"] in said.err
    assert "## torch_geometric.nn.conv: 1 of 1" in out.read_text()

    def wrong(case: Any, **_: Any) -> table.Result:
        return table.Result(case.name, graphs=1, wrong="12 nodes, 40 edges: result 0 is off by 1.0e+00")

    monkeypatch.setattr(table, "check", wrong)
    assert main(["support", "--out", str(out)]) == 1
    assert "0 of 1" in out.read_text()
