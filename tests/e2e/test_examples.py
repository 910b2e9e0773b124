"""Every example runs: ``--quick``, without a network, in a process of its own; numbers agree, and something is learned.

demo.py, distributed.py, partitioned.py and sampled_two_gpus.py have tests of their own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("sklearn")
from examples import common  # noqa: E402

LEARNED = {
    "node_classification": ("test accuracy", 0.7, 1.0),
    "graph_classification": ("test accuracy", 0.5, 1.0),
    "neighbour_sampling": ("test accuracy", 0.7, 1.0),
    "heterogeneous": ("test accuracy", 0.4, 1.0),
    "link_prediction": ("test AUC", 0.8, 1.0),
    "point_clouds": ("test accuracy", 0.45, 1.0),
    "molecules_with_forces": ("force error", 0.0, 0.6),
    "equivariant_forces": ("force error", 0.0, 0.6),
    "meshes": ("simulation error", 0.0, 0.5),
    "custom_message_passing": ("test accuracy", 0.8, 1.0),
    "train_step": ("test accuracy", 0.6, 1.0),
}
"""What an example must reach, eager and compiled: its measure, the least and the most of it."""

OF_MODELS = ("equivariant_forces", "meshes")
"""Train one of `gnncompile.models`, which only an installed gnncompile has."""

GUIDE = ("node_classification", "graph_classification")
"""PyG's guide to compiled models: one line changed, and one graph."""


def run(name: str, folder: Path, *flags: str) -> str:
    """Runs an example; returns what it wrote."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--quick", *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "All agree" in done.stdout and "PROBLEM" not in done.stdout, done.stdout
    return done.stdout


def table(written: str) -> list[tuple[str, list[float]]]:
    """The rows of the first table: name, then ms per step, times faster, first loss, last loss, result."""
    lines = written.split("ms/step", 1)[1].split("All agree")[0].splitlines()[1:]
    return [(line.split()[0], [float(n.rstrip("x")) for n in line.split()[1:]]) for line in lines]


def test_every_example_is_run() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py")}
    others = {"serving", "explain", "common", "demo", "distributed", "partitioned", "sampled_two_gpus"}
    assert found == {*LEARNED, *others}
    listed = (ROOT / "examples" / "README.md").read_text()
    assert all(f"{name}.py" in listed for name in found - {"common"})


@pytest.mark.parametrize("name", LEARNED)
def test_learns_as_eager_does(name: str, tmp_path: Path) -> None:
    if name in OF_MODELS:
        pytest.importorskip("gnncompile.models")
    written = run(name, tmp_path)
    what, least, most = LEARNED[name]
    assert what in written
    rows = table(written)
    assert [row[0] for row in rows] == ["eager", "TrainStep" if name == "train_step" else "gnncompile"]
    for _, (ms, _, first, last, result) in rows:
        assert ms > 0 and last < 0.9 * first and least <= result <= most, written
    if name in GUIDE:
        assert "Graph breaks: 0, recompiles: 0" in written, written
    if name == "custom_message_passing":
        assert len(re.findall(r"custom_message_passing\.py:\d+: return self\.own", written)) == 2, written
    assert list(tmp_path.iterdir()) == [], "nothing is downloaded, nothing left"


def test_serving(tmp_path: Path) -> None:
    written = run("serving", tmp_path)
    assert float(re.findall(r"test accuracy (\d\.\d+)", written)[0]) > 0.6, written
    assert re.search(r"start took [\d.]+ s", written) and re.search(r"eager [\d.]+, gnncompile [\d.]+", written), (
        written
    )


def test_explain(tmp_path: Path) -> None:
    written = run("explain", tmp_path)
    assert float(re.findall(r"an AUC of (\d\.\d+)", written)[0]) > 0.7, written


# -- what they share --------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, factor: float = 1.0, extra: bool = False) -> None:
        super().__init__()
        self.lin, self.factor = nn.Linear(3, 1), factor
        self.extra = nn.Parameter(torch.ones(1)) if extra else None
        nn.init.ones_(self.lin.weight)
        nn.init.ones_(self.lin.bias)

    def forward(self) -> torch.Tensor:
        bias = self.lin.bias * self.factor + self.lin.bias.detach() * (1 - self.factor)
        out = self.lin.weight.sum() * 100 + bias.sum()
        return out if self.extra is None else out + self.extra.sum()


def test_check_sees_a_wrong_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    common.check(Net(), Net(), lambda model: model())
    assert "The loss and 2 gradients agree" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"PROBLEM: lin\.bias differs"):
        common.check(Net(), Net(factor=1.1), lambda model: model())
    added = iter((0.0, 1.0))
    with pytest.raises(SystemExit, match="PROBLEM: the loss differs"):
        common.check(Net(), Net(), lambda model: model() + next(added))
    with pytest.raises(SystemExit, match="PROBLEM: other parameters have gradients: extra"):
        common.check(Net(), Net(extra=True), lambda model: model())


def test_compare_sees_another_result(capsys: pytest.CaptureFixture[str]) -> None:
    def fit(result: float):
        def train(steps: common.Steps) -> float:
            for _ in range(3):
                steps(lambda: torch.tensor(2.0))
            return result

        return train

    cpu = torch.device("cpu")
    assert common.compare({"eager": fit(0.5), "ours": fit(0.52)}, cpu, "accuracy", within=0.03) == 0
    assert table("ms/step" + capsys.readouterr().out.split("ms/step")[1])[1][0] == "ours"
    assert common.compare({"eager": fit(0.5), "ours": fit(0.6)}, cpu, "accuracy", within=0.03) == 1
    assert common.compare({"eager": fit(0.5), "ours": fit(float("nan"))}, cpu, "accuracy", within=0.03) == 1
    assert "PROBLEM: accuracy differs" in capsys.readouterr().out


class Stored:
    """A dataset as PyG's are: fetches what is not there when it is made."""

    def __init__(self, root: str, name: str) -> None:
        self.raw_dir, self.raw_paths = root, [str(Path(root, name))]
        self._download()

    def _download(self) -> None:
        if not Path(self.raw_paths[0]).exists():
            Path(self.raw_dir).mkdir(exist_ok=True)
            Path(self.raw_paths[0]).touch()


def test_data_is_fetched_only_when_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*flags: str) -> tuple[object, argparse.Namespace]:
        monkeypatch.setattr(sys, "argv", ["example", "--root", str(tmp_path), *flags])
        made = common.parser("", lr=0.5, epochs=9)
        common.add_dataset(made, ["Cora", "PubMed"], "digits")
        args = common.parse(made, epochs=3)
        return common.load(args, Stored, "folder", name=args.dataset), args

    found, args = load("--lr", "2")
    assert found is None and args.dataset == "digits" and (args.lr, args.epochs) == (2.0, 9)
    with pytest.raises(SystemExit, match=r"PubMed is not in .*folder.*--download"):
        load("--dataset", "PubMed")
    assert list(tmp_path.iterdir()) == []
    assert isinstance(load("--dataset", "PubMed", "--download")[0], Stored)
    found, args = load("--dataset", "PubMed", "--quick")
    assert isinstance(found, Stored) and args.epochs == 3
    assert load("--dataset", "digits")[0] is None
