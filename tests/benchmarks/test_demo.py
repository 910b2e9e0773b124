"""The demo's data, table, picture and verdict; `make test` runs the demo itself with --quick."""

import pytest
import torch

pytest.importorskip("sklearn")
from examples import demo
from examples.digits import data, tasks, training
from examples.digits.plot import plot
from examples.digits.training import Run

CPU = torch.device("cpu")


def runs(accuracy=97.9):
    return [
        Run("nodes", "GCN", "eager", 10.0, 1.0, 12.5, 98.0, 0, 0),
        Run("nodes", "GCN", "torch.compile", error="RuntimeError: no compiler"),
        Run("nodes", "GCN", "gnncompile", 2.5, 3.0, 1.5, accuracy, 0, 0),
    ]


def test_images_as_nodes():
    graph = data.images_as_nodes()
    assert graph.x.shape == (1797, 64) and graph.is_undirected() and not graph.has_self_loops()
    assert not set(graph.train_index.tolist()) & set(graph.test_index.tolist())
    assert len(graph.train_index) + len(graph.test_index) == 1797
    assert int(torch.bincount(graph.edge_index[1]).min()) >= 8


def test_images_as_graphs():
    train, test = data.images_as_graphs()
    assert len(train) + len(test) == 1797
    graph = train[0]
    assert graph.x.shape[1] == 3 and float(graph.x.min()) >= 0 and float(graph.x.max()) <= 1
    assert bool((graph.x[:, 0] > 0).all()), "only inked pixels are nodes"
    step = (graph.x[graph.edge_index[0], 1:] - graph.x[graph.edge_index[1], 1:]).abs() * (data.SIDE - 1)
    assert bool((step.max(dim=1).values - 1).abs().max() < 1e-5), "edges join neighbouring pixels"
    assert graph.is_undirected()
    assert len({g.num_nodes for g in train}) > 10


def test_batches_are_the_same_for_every_way_and_of_changing_size():
    task = tasks.graph_task(CPU, epochs=1, seed=0)
    first, again = list(task.train_batches(0)), list(task.train_batches(0))
    assert all(torch.equal(a.inputs[0], b.inputs[0]) for a, b in zip(first, again, strict=True))
    assert len({batch.inputs[0].size(0) for batch in first}) > 10
    assert len(first[-1].labels) < len(first[0].labels), "the last batch is smaller"
    assert not torch.equal(next(task.train_batches(1)).labels, first[0].labels)


def test_training_learns_and_is_measured():
    (task,) = (task for task in tasks.node_tasks(CPU, epochs=8, seed=0) if task.model_name == "GraphSAGE")
    run = training.train(task, "eager", CPU, 0, lambda message: None)
    assert run.error == "" and run.accuracy > 20 and run.step_ms > 0 and run.peak_mib > 1
    assert (run.graph_breaks, run.recompiles) == (0, 0)


def test_crash_becomes_an_error(monkeypatch):
    monkeypatch.setitem(training.WAYS, "eager", lambda model: lambda *inputs: 1 / 0)
    run = training.train(tasks.graph_task(CPU, epochs=1, seed=0), "eager", CPU, 0, lambda message: None)
    assert run.error == "ZeroDivisionError: division by zero" and run.step_ms is None


def test_table_and_picture(tmp_path):
    lines = demo.table(runs()).splitlines()
    assert lines[2].split() == ["nodes", "GCN", "eager", "10.00", "1.00", "1.0", "12.5", "98.00", "0", "0"]
    assert lines[3].split() == ["nodes", "GCN", "torch.compile", "FAILED"]
    assert lines[4].split()[3:5] == ["2.50", "4.00"]
    plot(runs(), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_what_makes_the_demo_fail():
    assert demo.problems(runs()) == [], "a crash of plain torch.compile is shown, no more"
    (problem,) = demo.problems(runs(accuracy=95.0))
    assert "95.00% is 3.00 points from eager's 98.00%" in problem
    assert demo.problems(runs(accuracy=float("nan")))
    crashed = [*runs()[:2], Run("nodes", "GCN", "gnncompile", error="RuntimeError: boom")]
    assert demo.problems(crashed) == ["nodes, GCN, gnncompile: RuntimeError: boom"]


def test_quick_is_small():
    args = demo.parse_args(["--quick"])
    assert args.models == ["GCN"] and args.epochs <= 20 and args.graph_epochs <= 3
    assert [task.name for task in demo.make_tasks(args, CPU)] == ["nodes", "graphs"]
