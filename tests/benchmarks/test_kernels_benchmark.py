"""The benchmark of one aggregation: its graphs, its rows, its tables. No time is asserted."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__
from benchmarks.cases import graphs
from benchmarks.commands import kernels
from benchmarks.measuring import comparison, counting
from benchmarks.rows import variants
from benchmarks.rows.kernels import KERNEL_ROWS, KernelRow, Structure, exact, index_add, rows_for

CPU = torch.device("cpu")
TINY = graphs.Graph("tiny", 30, 90, 8, lambda: graphs.uniform(30, 90), "for tests")
CASE = kernels.KernelCase(TINY, 8, torch.float32)
OPTIONS = comparison.Options(seconds=0.01, rounds=2)
BY_NAME = {row.name: row for row in KERNEL_ROWS}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    counting.reset()
    yield
    counting.reset()


@pytest.fixture
def structure():
    return Structure(TINY.make(), TINY.num_nodes)


def run(rows, structure, case=CASE):
    return kernels.run_kernels(case, structure, rows, CPU, OPTIONS)


def test_hub_and_even_have_the_same_sources():
    hub, even = graphs.hub(50), graphs.even(50)
    assert torch.equal(hub[0], even[0]) and bool((hub[1] == 0).all())
    assert torch.equal(even[1].sort().values, torch.arange(50))
    for name in ("hub", "even"):
        graph = graphs.KERNEL_GRAPHS[name]
        assert graph.make().shape == (2, graph.num_edges)


def test_structure_and_exact_sums(structure):
    rowptr, col = structure.csr
    x = torch.rand(30, 8)
    dense = torch.zeros(30, 30, dtype=torch.float64)
    dense.index_put_((structure.edge_index[1], structure.edge_index[0]), torch.ones((), dtype=torch.float64), True)
    rows = torch.repeat_interleave(torch.arange(30), rowptr.diff().long())
    again = torch.zeros_like(dense).index_put_((rows, col.long()), torch.ones((), dtype=torch.float64), True)
    assert torch.equal(dense, again)
    torch.testing.assert_close(exact(structure, x, chunk_bytes=1_000), dense @ x.double())
    torch.testing.assert_close(index_add(x, structure.edge_index), (dense @ x.double()).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_right_or_says_why_not(structure, dtype):
    results = run(rows_for(CPU), structure, replace(CASE, dtype=dtype))
    found = {result.row.name: result.status for result in results}
    assert found["eager"] == found["compile"] == found["gnncompile"] == "ok"
    assert found["MKL"] == "ok" or dtype == torch.bfloat16
    for result in results:
        assert (result.timing is not None) == (result.status == "ok") == (not result.message)


def test_partitioned_scatter_is_right_where_torch_has_it():
    row = BY_NAME["partitioned scatter"]
    assert row.devices == ("cuda",) and row.is_installed == variants.has_option(variants.PARTITIONED)
    structure = Structure(graphs.uniform(64, 8192), 64)  # Inductor leaves small sums as they are
    (result,) = run([row], structure)
    assert result.status == ("ok" if row.is_installed else "SKIPPED"), result.message
    (result,) = run([replace(row, option="no_such_option")], structure)
    assert result.status == "SKIPPED" and "has no no_such_option" in result.message


def test_rows_that_torch_has(monkeypatch):
    cuda = torch.device("cuda")
    assert "partitioned scatter" not in [variant.name for variant in variants.for_device(CPU)]
    for has in (True, False):
        monkeypatch.setattr(variants, "has_option", lambda name, has=has: has or not name)
        assert ("partitioned scatter" in [variant.name for variant in variants.for_device(cuda)]) == has


def test_wrong_and_broken_rows_have_no_time(structure):
    def broken(structure, dtype):
        raise RuntimeError("no such kernel")

    def full(structure, dtype):
        raise torch.OutOfMemoryError("tried to allocate")

    rows = [
        BY_NAME["MKL"],
        KernelRow("wrong", lambda structure, dtype: lambda x: index_add(x, structure.edge_index) * 1.001),
        KernelRow("broken", broken),
        KernelRow("full", full),
        KernelRow("missing", broken, package="no_such_package"),
    ]
    results = run(rows, structure)
    assert [result.status for result in results] == ["ok", "WRONG", "FAILED", "SKIPPED", "SKIPPED"]
    assert [result.timing is not None for result in results] == [True, False, False, False, False]
    assert kernels.over_sparse(results[0], results) == 1.0 and kernels.over_sparse(results[1], results) is None
    table = kernels.format_case(CASE, results)
    assert "wrong: WRONG: relative error 1.0e-03" in table and "x MKL" in table
    assert "missing: SKIPPED: no_such_package is not installed" in table
    assert "full: SKIPPED: out of memory" in table


def test_gathered_rows_that_cannot_fit_are_not_tried():
    large = kernels.KernelCase(replace(TINY, num_edges=10**12), 256, torch.float32)
    assert "out of memory" in kernels._why_skipped(BY_NAME["eager"], large, CPU)
    assert kernels._why_skipped(BY_NAME["MKL"], large, CPU) == ""


def test_kernels_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(graphs.KERNEL_GRAPHS, "tiny", TINY)
    command = [
        "kernels",
        "--device",
        "cpu",
        "--quick",
        "--graphs",
        "tiny",
        "--dtypes",
        "float32",
        "--out",
        str(tmp_path),
    ]
    assert __main__.main([*command, "--rows", "eager,MKL", "--widths", "4,8"]) == 0
    assert "tiny, 4 x float32" in capsys.readouterr().out
    assert __main__.main([*command, "--rows", "eager", "--widths", "8", "--budget", "0"]) == 0
    assert "left out, over the budget of 0 s: tiny, 8 x float32" in capsys.readouterr().out
    stored = json.loads((tmp_path / "kernels-cpu.json").read_text())["rows"]
    assert [(row["width"], row["row"]) for row in stored] == [(4, "eager"), (4, "MKL"), (8, "eager"), (8, "MKL")]
    assert all(row["us"] > 0 and row["over_sparse"] > 0 and row["gathered_tb_per_s"] > 0 for row in stored)


@pytest.mark.parametrize("argument", ["--graphs", "--dtypes", "--rows"])
def test_kernels_refuses_unknown_names(argument, capsys):
    assert __main__.main(["kernels", "--device", "cpu", argument, "nope"]) == 2
    assert f"{argument[2:]}: got" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_row_on_a_gpu():
    device = torch.device("cuda")
    edge_index = graphs.power_law(1_000, 20_000, max_degree=300, device=device)
    assert edge_index.is_cuda and edge_index.shape == (2, 20_000)
    case = kernels.KernelCase(replace(TINY, num_nodes=1_000, num_edges=20_000), 16, torch.float32)
    results = kernels.run_kernels(case, Structure(edge_index, 1_000), rows_for(device), device, OPTIONS)
    assert {result.status for result in results if result.row.is_installed} == {"ok"}
    assert all(result.call_ms is not None for result in results if result.timing)
