"""``python -m benchmarks serving``: answers are checked before they are timed, and clients are threads."""

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.cases.serving import CASES
from benchmarks.commands.serving import Measurement, ServingResult, _double, format_case, record
from benchmarks.measuring import packages as packages_module
from benchmarks.measuring import processes
from benchmarks.measuring.clients import Served, measure
from benchmarks.measuring.packages import Packages
from benchmarks.measuring.processes import ProcessError
from benchmarks.rows.serving import ROWS, ServingRow, for_device

SINGLE = next(case for case in CASES if case.name == "GINE-single")
CPU = torch.device("cpu")


def measured(tmp_path, *rows, clients=(1,), limit=100.0, server=None, packages=None):
    packages = packages or Packages(tmp_path, CPU, 0, limit)
    return Measurement(SINGLE, rows, clients, 0.02, packages, lambda message: None, server).run()


def answers(serve):
    """Returns a row that answers with a function."""
    return ServingRow("row", lambda model: lambda *given: serve(model, *given), is_ours=True)


def test_a_package_in_cpp_is_compared_with_aotinductor_in_cpp():
    times = {"AOTInductor": 80.0, "package": 40.0, "AOTInductor in C++": 30.0, "package in C++": 10.0}
    rows = {row.name: row for row in ROWS}
    results = [ServingResult(row=rows[name], p50_us=time) for name, time in times.items()]
    assert [record(SINGLE, one, results)["over_aot"] for one in results] == [1, 2, 1, 3]
    alone = [one for one in results if one.row.name != "AOTInductor in C++"]
    assert record(SINGLE, alone[-1], alone)["over_aot"] is None


def test_requests_are_graphs_of_different_sizes():
    requests = SINGLE.requests(3, seed=0)
    assert len({request[0].size(0) for request in requests}) == 3
    for x, edge_index, edge_attr in requests:
        assert edge_index.max() < x.size(0) and edge_index.size(1) == edge_attr.size(0)
    batch = next(case for case in CASES if case.name == "GCN-batch").requests(1, seed=0)[0]
    assert batch[0].size(0) == 128 * 30 and batch[1].max() >= 127 * 30


def test_the_example_of_a_package_is_the_first_request():
    for one, other in zip(SINGLE.requests(1, seed=3)[0], SINGLE.requests(8, seed=3)[0], strict=True):
        assert torch.equal(one, other)


def test_eager_is_timed_with_each_number_of_clients(tmp_path):
    seen = set()

    def serve(model, *given):
        seen.add(threading.current_thread())
        return model(*given)

    found = measured(tmp_path, answers(serve), clients=(1, 2))
    assert [result.clients for result in found] == [1, 2] and len(seen) == 3
    assert all(0 < result.p50_us <= result.p99_us for result in found)
    assert "row" in format_case(found) and format_case(found, "a card").startswith("a card")
    stored = record(SINGLE, found[0], found)
    assert stored["status"] == "ok" and stored["example"] is None


@pytest.mark.parametrize(
    ("serve", "status"),
    [(lambda model, x, *_: x, "WRONG"), (lambda model, x, *_: x * float("nan"), "WRONG"), (None, "FAILED")],
)
def test_no_time_without_correctness(tmp_path, serve, status):
    (found,) = measured(tmp_path, answers(serve))
    assert found.status == status and found.p50_us is None


@pytest.mark.parametrize("status", ["WRONG", "FAILED"])
def test_answers_that_only_several_clients_get_wrong_have_no_time(tmp_path, status):
    def serve(model, *given):
        if threading.current_thread() is threading.main_thread():
            return model(*given)
        if status == "FAILED":
            raise RuntimeError("another thread")
        return model(*given) + 1

    one, two = measured(tmp_path, answers(serve), clients=(1, 2))
    assert one.status == "ok" and (two.status, two.p50_us) == (status, None)
    assert status == "WRONG" or two.message == "RuntimeError: another thread"


def test_on_a_gpu_each_time_ends_when_the_answer_is_complete(monkeypatch):
    """The GPU is a list of what it is asked for, and the tensors are on the CPU."""
    done, device, local = [], torch.device("cuda"), threading.local()
    model, requests = SINGLE.model(), SINGLE.requests(2, seed=0)

    class Stream:
        def __init__(self, device=None):
            self.name = "another" if device else "default"

        def synchronize(self):
            done.append(f"wait for {self.name}")

    @contextlib.contextmanager
    def stream(own):
        local.stream = own
        yield

    def serve(*given):
        done.append("answer")
        return model(*given)

    fakes = {"Stream": Stream, "stream": stream, "synchronize": lambda device: done.append("all")}
    fakes["current_stream"] = lambda device: getattr(local, "stream", Stream())
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with torch.no_grad():
        expected = torch.cat([model.double()(*_double(request)) for request in requests])
    model.float()
    for clients, name in ((1, "default"), (2, "another")):
        done.clear()
        (found,) = measure(serve, requests, expected, (clients,), 0.0, device)
        assert found.status == "ok" and found.p50_us > 0
        timed = done[done.index("all") + 1 :]
        if clients == 1:
            assert timed == [f"wait for {name}", "answer", f"wait for {name}", "answer", "answer"]
        assert timed.count(f"wait for {name}") == 2 * clients and timed.count("answer") == clients + len(requests)


def test_a_row_that_answers_in_one_thread_skips_more_clients(tmp_path):
    row = ServingRow("one thread", lambda model: model, in_one_thread=True)
    assert [result.status for result in measured(tmp_path, row, clients=(1, 2))] == ["ok", "SKIPPED"]


def test_rows_that_fail_or_take_too_long_do_not_stop_the_others(tmp_path):
    def broken(model):
        raise RuntimeError("no compiler")

    rows = ServingRow("broken", broken), ServingRow("slow", lambda model: time.sleep(30)), answers(lambda m, *g: m(*g))
    first, second, third = measured(tmp_path, *rows, limit=1.0)
    assert first.status == "FAILED" and "no compiler" in first.message
    assert second.status == "FAILED" and "took longer than" in second.message
    assert third.status == "ok" and third.p50_us > 0


def test_a_reference_that_fails_fails_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(type(SINGLE), "model", lambda self, device="cpu": torch.nn.Linear(3, 3))
    found = measured(tmp_path, *ROWS[:2])
    assert [result.status for result in found] == ["FAILED", "FAILED"] and found[1].row is ROWS[1]


# -- rows and arguments -------------------------------------------------------------------------------------------


def test_rows_of_each_device():
    cpu, cuda = ([row.name for row in for_device(torch.device(place), True)] for place in ("cpu", "cuda:1"))
    assert set(cuda) - set(cpu) == {"torch.compile reduce-overhead"}
    assert {"eager", "torch.compile", "AOTInductor", "gnncompile", "package", "package in C++"} <= set(cpu) & set(cuda)
    assert not [row for row in for_device(CPU, False) if row.in_cpp]
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all((row.make is None) == bool(row.package) for row in ROWS)


def test_other_devices_and_rows_are_refused(capsys):
    assert main(["serving", "--quick", "--device", "meta"]) == 2
    assert main(["serving", "--quick", "--device", "cpu", "--rows", "torch.compile reduce-overhead"]) == 2
    assert main(["serving", "--quick", "--device", "cpu", "--soak", "3"]) == 2
    said = capsys.readouterr().err
    assert "expected cpu or cuda" in said and "rows: got torch.compile reduce-overhead" in said and "--server" in said


def test_cases_over_the_budget_are_left_out(tmp_path, capsys):
    command = ["serving", "--quick", "--device", "cpu", "--rows", "eager", "--out", str(tmp_path)]
    cases = ["--cases", "GCN-single,GINE-single"]
    assert main([*command, *cases, "--budget", "0"]) == 0
    assert "left out, over the budget of 0 s: GCN-single, GINE-single" in capsys.readouterr().out
    assert main([*command, *cases, "--clients", "1"]) == 0
    rows = json.loads((tmp_path / "serving-cpu.json").read_text())["rows"]
    assert [(row["case"], row["row"], row["status"]) for row in rows] == [
        ("GCN-single", "eager", "ok"),
        ("GINE-single", "eager", "ok"),
    ]


# -- other processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Returns a function that makes a module from a text, which `processes.run` finds."""
    (tmp_path / "benchmarks" / "measuring").mkdir(parents=True)

    def make(text):
        (tmp_path / "benchmarks" / "measuring" / "child.py").write_text(text)
        return "child"

    # The folders have no __init__.py, so the repository's own modules are still found.
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    return make


RETURNS = """
import json, sys
from pathlib import Path
settings = json.loads(sys.argv[1])
Path(sys.argv[2]).write_text(json.dumps({"result": [settings["a"] + 1]}))
"""


def test_a_process_returns_its_result(module):
    assert processes.run(module(RETURNS), {"a": 1}, 60) == [2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; print('bad news', file=sys.stderr); sys.exit(3)", "exit status 3: bad news"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11: no message"),
        ("import time; time.sleep(60)", "took longer than 1 s"),
    ],
)
def test_a_process_that_dies_or_hangs_is_an_error(module, text, said):
    with pytest.raises(ProcessError, match=said):
        processes.run(module(text), {}, 1 if "sleep" in text else 60)


def test_a_process_that_hangs_ends_with_all_that_it_started(module, tmp_path):
    text = f"""
import subprocess, sys, time
from pathlib import Path
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path({str(tmp_path / "pid")!r}).write_text(str(started.pid))
time.sleep(60)
"""
    with pytest.raises(ProcessError):
        processes.run(module(text), {}, 3)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    stop = time.monotonic() + 10
    while status.exists() and ") Z " not in status.read_text() and time.monotonic() < stop:
        time.sleep(0.05)
    assert not status.exists() or ") Z " in status.read_text()


def test_an_error_in_a_process_is_told_in_one_line(monkeypatch, tmp_path):
    def work(settings):
        raise ValueError(f"got {settings['a']}\nmore")

    monkeypatch.setattr(sys, "argv", ["child", '{"a": 1}', str(tmp_path / "result.json")])
    assert processes.main(work) == 1
    assert json.loads((tmp_path / "result.json").read_text()) == {"error": "ValueError: got 1"}


def test_a_package_is_made_once_and_so_is_its_failure(monkeypatch, tmp_path):
    asked = []

    def run(module, settings, seconds):
        asked.append((module, settings["kind"], settings["case"], seconds))
        if settings["kind"] == "AOTInductor":
            raise ProcessError("no compiler")

    monkeypatch.setattr(packages_module.processes, "run", run)
    made, others = Packages(tmp_path, CPU, 0, 9.0), [case for case in CASES if case.model_name == "GINE"]
    assert len({made.path("gnncompile", case) for case in (SINGLE, *others)}) == 1
    for case in (SINGLE, *others):
        with pytest.raises(ProcessError, match="no compiler"):
            made.path("AOTInductor", case)
    assert asked == [("packages", kind, "GINE-single", 9.0) for kind in ("gnncompile", "AOTInductor")]
    assert made.example("gnncompile", others[0]) == "GINE-single" and made.example("", others[0]) is None
    (found,) = measured(tmp_path, ServingRow("aot", package="AOTInductor"), packages=made)
    assert (found.status, found.message) == ("FAILED", "no compiler")


def test_packages_of_all_models_are_made_before_any_time_is_taken(monkeypatch, tmp_path):
    asked = []

    def run(module, settings, seconds):
        asked.append((settings["kind"], settings["case"]))
        if settings["kind"] == "AOTInductor":
            raise ProcessError("no compiler")

    monkeypatch.setattr(packages_module.processes, "run", run)
    made = Packages(tmp_path, CPU, 0, 9.0)
    made.make(["AOTInductor", "gnncompile"], [case for case in CASES if case.model_name in ("GINE", "GAT")])
    cases = ("GAT-guide", "GINE-guide")
    assert sorted(asked) == [(kind, case) for kind in ("AOTInductor", "gnncompile") for case in cases]
    made.path("gnncompile", SINGLE)
    with pytest.raises(ProcessError, match="no compiler"):
        made.path("AOTInductor", SINGLE)
    assert len(asked) == 4


def test_packages_are_measured_where_the_gpu_fails_for_this_process(monkeypatch, tmp_path):
    def run(module, settings, seconds):
        assert settings["device"] == "cuda:99"
        return [asdict(Served(p50_us=3.0))] if module == "answers" else None

    monkeypatch.setattr(packages_module.processes, "run", run)
    made = Packages(tmp_path, torch.device("cuda:99"), 0, 9.0)
    rows = answers(lambda model, *given: model(*given)), ServingRow("package", package="gnncompile")
    first, second = measured(tmp_path, *rows, packages=made)
    assert first.status == "FAILED" and (second.status, second.p50_us) == ("ok", 3.0)


def test_a_package_answers_in_a_process_without_gnncompile(tmp_path):
    row = next(row for row in ROWS if row.name == "package")
    found = measured(tmp_path, row, clients=(1, 2), limit=300.0)
    assert [(result.status, result.message, result.clients) for result in found] == [("ok", "", 1), ("ok", "", 2)]
    assert all(0 < result.p50_us <= result.p99_us for result in found)
    assert {record(SINGLE, result, found)["example"] for result in found} == {"GINE-single"}


SERVER = """
import shutil, sys
from pathlib import Path
answers = Path(sys.argv[3])
answers.with_name("options.txt").write_text(f"{sys.argv[5]} {sys.argv[7]}")
if not answers.with_name("prepared.pt").exists():
    sys.exit("server: no file")
shutil.copy(answers.with_name("prepared.pt"), answers)
print('{"p50": 1, "p99": 2, "per second": 3}')
"""


def test_the_servers_answers_are_checked_too(monkeypatch, tmp_path):
    """The server is a script that gives answers which were prepared: right and wrong ones, or an error."""
    server = tmp_path / "server"
    server.write_text(f"#!{sys.executable}\n{SERVER}")
    os.chmod(server, 0o700)
    monkeypatch.setattr(packages_module.processes, "run", lambda *given: None)
    row = ServingRow("in C++", package="gnncompile", is_ours=True, keeps_layout=True, in_cpp=True)
    (found,) = measured(tmp_path, row, clients=(2,), server=server)
    assert (found.status, found.message) == ("FAILED", "server: no file")
    model, requests = SINGLE.model(), SINGLE.requests(8, seed=0)
    with torch.no_grad():
        right = [[model(*request)] for request in requests]
    for given, status in (
        (right, "ok"),
        ([[request[0]] for request in requests], "WRONG"),
        (["no answer", *right[1:]], "FAILED"),
    ):
        torch.save(given, tmp_path / "prepared.pt")
        (found,) = measured(tmp_path, row, clients=(2,), server=server)
        assert (found.status, found.p50_us) == (status, 1 if status == "ok" else None)
    assert (tmp_path / "options.txt").read_text() == "2 once"


# -- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_smallest_case_on_a_gpu(tmp_path, capsys):
    command = ["serving", "--quick", "--device", "cuda", "--cases", "GraphSAGE-single", "--clients", "1,2"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "serving-cuda.json").read_text())
    found = {(row["row"], row["clients"]): row for row in stored["rows"]}
    expected = {(row.name, clients) for row in for_device(torch.device("cuda"), False) for clients in (1, 2)}
    assert set(found) == expected
    for (name, clients), row in found.items():
        is_skipped = name == "torch.compile reduce-overhead" and clients == 2
        assert row["status"] == ("SKIPPED" if is_skipped else "ok"), row
        assert (row["p50_us"] is None) == is_skipped
    card = torch.cuda.get_device_name()
    assert card in capsys.readouterr().out and card in stored["environment"]["gpu"]
