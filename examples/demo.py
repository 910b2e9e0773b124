"""Trains four GNNs on handwritten digits: eager, with torch.compile and with gnncompile; one table, one plot.

    python examples/demo.py            a few minutes on two CPU cores
    python examples/demo.py --quick    a smoke test: one model per task, few steps

The data is real and ships with scikit-learn, so nothing is downloaded: 1,797 images of 8 x 8 pixels, 10 classes. Each
model is trained three times from the same seed, on three tasks:

    nodes    all images as one nearest-neighbour graph, node classification with PyG's GCN, GraphSAGE, GIN and GAT
    sampled  GraphSAGE on neighbourhoods that `gnncompile.loader` samples from that graph; only if asked for (--tasks)
    graphs   each image as a graph of its inked pixels, graph classification with GIN, mini-batches of changing size

The exit status is 1 if gnncompile fails, or if test accuracies of one model differ by more than rounding can explain.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` measures for the demo too, and is not installed

from benchmarks.measuring import environment, measure  # noqa: E402
from benchmarks.reporting import tables  # noqa: E402
from examples.digits.plot import plot  # noqa: E402
from examples.digits.tasks import NODE_MODELS, Task, graph_task, node_tasks, sampled_task  # noqa: E402
from examples.digits.training import WARMUP, WAYS, Run, explain, train  # noqa: E402

# In points. Rounding differs from one way to the next and grows while training: two eager runs whose first weights
# differ by 3e-7 end up to 1.0 points apart (GIN on graphs). A wrong gradient costs tens of points.
ACCURACY_TOLERANCE = 2.0

HEADER = ["task", "model", "how", "ms/step", "x eager", "total s", "peak MiB", "accuracy %", "breaks", "recompiles"]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--tasks", nargs="+", choices=["nodes", "sampled", "graphs"], default=["nodes", "graphs"])
    parser.add_argument("--models", nargs="+", choices=list(NODE_MODELS), help="of the task nodes (default: all)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--epochs", type=int, default=100, help="of the task nodes (default: %(default)s)")
    parser.add_argument("--graph-epochs", type=int, default=30, help="of the other tasks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="folder of the plot and the reports")
    parser.add_argument("--quick", action="store_true", help="a smoke test: GCN on nodes, GIN on graphs, few epochs")
    args = parser.parse_args(argv)
    if args.quick:
        args.epochs, args.graph_epochs = min(args.epochs, 20), min(args.graph_epochs, 3)
    args.models = args.models or (["GCN"] if args.quick else list(NODE_MODELS))
    return args


def make_tasks(args: argparse.Namespace, device: torch.device) -> list[Task]:
    """Returns the tasks that the command line asks for."""
    tasks = []
    if "nodes" in args.tasks:
        tasks += [task for task in node_tasks(device, args.epochs, args.seed) if task.model_name in args.models]
    if "sampled" in args.tasks:
        tasks.append(sampled_task(device, args.graph_epochs, args.seed))
    if "graphs" in args.tasks:
        tasks.append(graph_task(device, args.graph_epochs, args.seed))
    return tasks


def table(runs: Sequence[Run]) -> str:
    """Returns the one table of the demo."""
    rows = []
    for run in runs:
        eager = baseline(run, runs)
        faster = eager.step_ms / run.step_ms if eager and eager.step_ms and run.step_ms else None
        cells = [
            *(f"{run.step_ms:.2f}" if run.step_ms else "FAILED", f"{faster:.2f}" if faster else ""),
            *(f"{value:.1f}" if value is not None else "" for value in (run.total_s, run.peak_mib)),
            f"{run.accuracy:.2f}" if run.accuracy is not None else "",
            *(str(count) if count is not None else "" for count in (run.graph_breaks, run.recompiles)),
        ]
        rows.append([run.task, run.model, run.way, *cells])
    return tables.text_table(HEADER, rows, left=3)


def notes(device: torch.device) -> str:
    """Says what the columns of the table mean."""
    lines = {
        "ms/step": f"median whole training step without data loading, the first {WARMUP} steps left out",
        "total s": "the whole training, compilation included",
        "peak MiB": f"{measure.peak_memory_definition(device)} (forward and backward)",
        "accuracy": "of the test half of the images, by the trained model run the same way",
        "breaks": "graph breaks of the first step; recompiles: in all of training",
    }
    return tables.header_lines(lines)


def baseline(run: Run, runs: Sequence[Run]) -> Run | None:
    """Returns the eager run of the same task and model."""
    same = [other for other in runs if (other.task, other.model, other.way) == (run.task, run.model, "eager")]
    return same[0] if same else None


def problems(runs: Sequence[Run]) -> list[str]:
    """Returns what makes the demo fail: a crash of eager or gnncompile, accuracies that do not agree.

    A crash of plain torch.compile (for example, where there is no C++ compiler) is shown in the table, no more.
    """
    found = []
    for run in runs:
        name = f"{run.task}, {run.model}, {run.way}"
        if run.error and run.way != "torch.compile":
            found.append(f"{name}: {run.error}")
        eager = baseline(run, runs)
        if run.accuracy is None or eager is None or eager.accuracy is None:
            continue
        difference = abs(run.accuracy - eager.accuracy)
        if not difference <= ACCURACY_TOLERANCE:
            found.append(
                f"{name}: test accuracy {run.accuracy:.2f}% is {difference:.2f} points from eager's "
                f"{eager.accuracy:.2f}%, more than {ACCURACY_TOLERANCE}"
            )
    return found


def progress(prefix: str) -> Callable[[str], None]:
    """Shows what is being done: on a terminal as one changing line, in a log as a line per run."""
    terminal = sys.stderr.isatty()
    if not terminal:
        print(prefix, file=sys.stderr, flush=True)

    def show(message: str) -> None:
        if terminal:
            print(f"\r\033[K{prefix + ': ' + message if message else ''}", end="", file=sys.stderr, flush=True)

    return show


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit status."""
    args = parse_args(argv)
    device = torch.device(args.device)
    command = ["python", "examples/demo.py", *(sys.argv[1:] if argv is None else argv)]
    header = tables.header_lines(environment.describe(device, command))
    print(header, flush=True)
    # Plain torch.compile warns at every graph break; here they are counted in the table.
    torch._logging.set_logs(dynamo=logging.ERROR)
    args.out.mkdir(parents=True, exist_ok=True)

    tasks = make_tasks(args, device)
    plan = [(task, way) for task in tasks for way in args.ways]
    if args.quick:  # recompiling for every batch size is what takes longest
        plan = [(task, way) for task, way in plan if (task.name, way) != ("graphs", "torch.compile")]
    runs: list[Run] = []
    for number, (task, way) in enumerate(plan, 1):
        show = progress(f"[{number}/{len(plan)}] {task.name}, {task.model_name}, {way}")
        show("starting")
        runs.append(train(task, way, device, args.seed, show))
    text = f"{table(runs)}\n\n{notes(device)}"
    print(f"\n{text}\n")
    (args.out / "table.txt").write_text(f"{header}\n\n{text}\n")
    plot(runs, args.out / "demo.png")
    written = ["table.txt", "demo.png"]

    found = problems(runs)
    if "gnncompile" in args.ways:
        for task in tasks:
            name = f"explain-{task.name}-{task.model_name.lower()}.txt"
            try:
                (args.out / name).write_text(explain(task, device, args.seed) + "\n")
                written.append(name)
            except Exception as error:
                found.append(f"{task.name}, {task.model_name}, explain: {type(error).__name__}: {error}")
    print(f"written to {args.out}: {', '.join(written)}")
    for run in runs:
        if run.error and run.way == "torch.compile":
            print(f"note: {run.task}, {run.model}, torch.compile failed: {run.error}")
    for line in found:
        print(f"PROBLEM: {line}", file=sys.stderr)
    if not found and len(args.ways) > 1:
        print(f"All ways agree on test accuracy (within {ACCURACY_TOLERANCE} points of eager).")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
