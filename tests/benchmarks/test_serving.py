"""``python -m benchmarks serving``: answers are checked before they are timed, and clients are threads."""

import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.cases.serving import CASES
from benchmarks.commands.serving import ROWS, ServingRow, _Measurement, format_case, record

SINGLE = next(case for case in CASES if case.name == "GINE-single")


def measured(row, clients=(1,)):
    with tempfile.TemporaryDirectory() as folder:
        return _Measurement(SINGLE, [row], clients, 0.02, None, 0, lambda message: None, Path(folder)).run()


def test_requests_are_graphs_of_different_sizes():
    requests = SINGLE.requests(3, seed=0)
    assert len({request[0].size(0) for request in requests}) == 3
    for x, edge_index, edge_attr in requests:
        assert edge_index.max() < x.size(0) and edge_index.size(1) == edge_attr.size(0)
    batch = next(case for case in CASES if case.name == "GCN-batch").requests(1, seed=0)[0]
    assert batch[0].size(0) == 128 * 30 and batch[1].max() >= 127 * 30


def test_eager_is_timed_with_each_number_of_clients():
    seen = set()

    def make(model, request, folder):
        def serve(*given):
            seen.add(threading.current_thread())
            return model(*given)

        return serve

    found = measured(ServingRow("eager", make), (1, 2))
    assert [result.clients for result in found] == [1, 2] and len(seen) >= 3
    assert all(0 < result.p50_us <= result.p99_us for result in found)
    assert "eager" in format_case(found) and record(SINGLE, found[0], found)["status"] == "ok"


@pytest.mark.parametrize(
    ("serve", "status"), [(lambda x, *_: x, "WRONG"), (lambda x, *_: x * float("nan"), "WRONG"), (None, "FAILED")]
)
def test_no_time_without_correctness(serve, status):
    (found,) = measured(ServingRow("wrong", lambda *_: serve, is_ours=True))
    assert found.status == status and found.p50_us is None


def test_a_row_that_can_not_be_built_does_not_stop_the_others():
    def make(model, request, folder):
        raise RuntimeError("no compiler")

    (found,) = measured(ServingRow("broken", make))
    assert found.status == "FAILED" and "no compiler" in found.message


def test_other_devices_are_refused():
    assert main(["serving", "--quick", "--device", "meta"]) == 2
    assert next(row.name for row in ROWS if row.options is not None) == "package in C++" and torch.is_grad_enabled()


SERVER = """
import shutil, sys
from pathlib import Path
answers = Path(sys.argv[3])
shutil.copy(answers.with_name("prepared.pt"), answers)
answers.with_name("options.txt").write_text(f"{sys.argv[5]} {sys.argv[7]}")
print('{"p50": 1, "p99": 2, "per second": 3}')
"""


def test_the_servers_answers_are_checked_too(tmp_path):
    """The server is a script that gives answers which were prepared: the features of nodes, or an error."""
    server = tmp_path / "server"
    server.write_text(f"#!{sys.executable}\n{SERVER}")
    server.chmod(0o700)
    row = ServingRow("in C++", lambda model, *_: model, is_ours=True, options=("--layout", "once"))
    measurement = _Measurement(SINGLE, [row], (2,), 0.02, server, 0, lambda message: None, tmp_path)
    given = [[request[0]] for request in measurement.requests]
    for answers, status in ((given, "WRONG"), (["no answer", *given[1:]], "FAILED")):
        torch.save(answers, tmp_path / "prepared.pt")
        (found,) = measurement.run()
        assert (found.status, found.p50_us) == (status, None)
    assert (tmp_path / "options.txt").read_text() == "2 once"
