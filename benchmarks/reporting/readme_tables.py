"""Makes the tables of the README and other pages from stored results. A marker in the text names each table."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.serving import CASES
from benchmarks.reporting.stored import Record, Stored, best

COMPILE = ("compile", "compile dynamic", "partitioned scatter")
"""Rows of `torch.compile` without CUDA graphs; tables show the best of them."""

Cells = Sequence[str]


def markdown(header: Cells, rows: Sequence[Cells]) -> str:
    """Returns a table of Markdown."""
    lines = [f"| {' | '.join(header)} |".replace("|  |", "| |"), "|---" * len(header) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)])


def number(value: float | None) -> str:
    """Returns a number as text with three digits, but at most two after the decimal point."""
    if value is None:
        return ""
    for digits, limit in ((2, 10), (1, 100)):
        text = f"{value:.{digits}f}"
        if abs(float(text)) < limit:
            return text
    return f"{value:.0f}"


def with_memory(milliseconds: float | None, peak: float | None) -> str:
    """Returns a time, followed by the peak memory in brackets if it is known."""
    return number(milliseconds) + (f" ({peak:.0f})" if peak is not None and peak > 0 else "")


def times(base: float | None, value: float | None, digits: int | None = None) -> str:
    """Returns how many times faster `value` is than `base`, as text with `digits` decimals; None for two digits."""
    if base is None or value is None:
        return ""
    ratio = base / value
    return f"{ratio:.{(1 if ratio < 10 else 0) if digits is None else digits}f}x"


def steps(folder: Path) -> str:
    """Times of forward and backward, and of whole training steps; gnncompile replays CUDA graphs."""
    header = [
        "",
        "forward, backward: eager",
        "better torch.compile",
        "`reduce-overhead` of torch",
        "ours",
        "over eager",
        "with loss, Adam: eager",
        "best torch.compile",
        "`TrainStep`",
        "over eager",
        "device alone",
    ]
    both = Stored(folder / "nvidia-h200" / "guide-guide-cuda.json").by("model")
    whole = Stored(folder / "nvidia-h200" / "training-guide-cuda.json").by("model")
    rows = []
    for model, plain in both.items():
        eager, ours = plain["eager"]["median_ms"], plain["gnncompile r-o"]["median_ms"]
        train = whole[model]
        step = train["TrainStep"]
        cells = [
            eager,
            best(plain, COMPILE, "median_ms"),
            plain["reduce-overhead"]["median_ms"],
            ours,
            times(eager, ours, 1),
            train["eager"]["median_ms"],
            best(train, (*COMPILE, "reduce-overhead"), "median_ms"),
            step["median_ms"],
            times(train["eager"]["median_ms"], step["median_ms"], 1),
            step["device_ms"],
        ]
        rows.append([model, *_cells(cells)])
    return markdown(header, rows)


def minibatch(folder: Path) -> str:
    """Training on mini-batches whose sizes change."""
    names = {
        "molecules-128": "GIN, 128 molecules",
        "molecules-1024": "GIN, 1,024 molecules",
        "sampled": "GraphSAGE, sampled",
        "sampled-seeds": "GraphSAGE, sampled, rows of seeds",
        "digits": "GIN, 64 graphs of digits",
    }
    header = [
        "",
        "step: eager",
        "`dynamic=True`",
        "gnncompile",
        "`reduce-overhead`, buckets",
        "`TrainStep`, buckets",
        "over `dynamic=True`",
        "loop: eager",
        "`dynamic=True`",
        "`TrainStep`, buckets",
    ]
    rows = []
    for case, found in Stored(folder / "nvidia-h200" / "minibatch-cuda.json").by("case").items():
        shown = ("eager", "compile dynamic", "gnncompile", "r-o buckets", "TrainStep buckets")
        step = [found[row]["step_ms"] for row in shown]
        loop = [found[row]["loop_ms"] for row in ("eager", "compile dynamic", "TrainStep buckets")]
        rows.append([names.get(case, case), *_cells([*step, times(step[1], step[-1], 1), *loop])])
    return markdown(header, rows)


def compile_time(folder: Path) -> str:
    """Seconds until the first step has run."""
    shown = ("compile", "compile dynamic", "gnncompile")
    header = [
        "model",
        "cold: torch.compile",
        "`dynamic=True`",
        "gnncompile",
        "over torch.compile",
        "second process: torch.compile",
        "`dynamic=True`",
        "gnncompile",
        "over our cold",
    ]

    def seconds(record: Record, start: str) -> str:
        return f"{record[f'{start}_seconds']:.1f} ({record[f'{start}_cpu_seconds']:.1f})"

    rows = []
    for model, found in Stored(folder / "cpu-xeon-2-cores" / "compile-time.json").by("model").items():
        ours = found["gnncompile"]
        ratios = [f"{ours[name]:.2f}x ({ours[f'cpu {name}']:.2f}x)" for name in ("over compile", "second / cold")]
        cold, second = ([seconds(found[row], start) for row in shown] for start in ("cold", "second"))
        rows.append([model, *cold, ratios[0], *second, ratios[1]])
    return markdown(header, rows)


def power_law(folder: Path) -> str:
    """The models of PyG's compile guide on the large graph."""
    graph = "power law, 169,343 nodes, 2,332,486 edges, 128 channels"
    return _over_graph(graph, folder / "nvidia-h200" / "guide-powerlaw-arxiv-cuda.json")


def guide_gpu(folder: Path) -> str:
    """The models of PyG's compile guide on a GPU, on the guide's own graph."""
    graph = "guide, 10,000 nodes, 200,000 edges, 64 channels"
    return _over_graph(graph, folder / "nvidia-h200" / "guide-guide-cuda.json")


def _over_graph(graph: str, path: Path) -> str:
    header = ["graph", "model", "eager", "better torch.compile", "gnncompile", "over eager", "over compile"]
    rows: list[list[str]] = []
    for model, found in Stored(path).by("model").items():
        eager, compiled, ours = _three(found)
        cells = _cells([eager, compiled, ours, times(eager, ours, 1), times(compiled, ours, 2)])
        rows.append([graph if not rows else "", model, *cells])
    return markdown(header, rows)


def guide_cpu(folder: Path) -> str:
    """The models of PyG's compile guide on a CPU."""
    header = [
        "model",
        "eager",
        "better torch.compile",
        "gnncompile",
        "over eager",
        "over compile",
        "peak MiB: eager / compile / gnncompile",
    ]
    rows = []
    for model, found in Stored(folder / "cpu-xeon-2-cores" / "guide-guide-cpu.json").by("model").items():
        eager, compiled, ours = _three(found)
        peaks = [found["eager"]["peak_mib"], best(found, COMPILE, "peak_mib"), found["gnncompile"]["peak_mib"]]
        cells = _cells([eager, compiled, ours, times(eager, ours), times(compiled, ours)])
        rows.append([model, *cells, " / ".join(f"{peak:.0f}" for peak in peaks)])
    return markdown(header, rows)


def memory_cpu(folder: Path) -> str:
    """Peak memory of the models of PyG's compile guide on a CPU."""
    shown = ("eager", "compile", "gnncompile")
    header = ["model", "peak: eager", "torch.compile", "gnncompile", "kept for the backward: eager"]
    header += ["torch.compile", "gnncompile"]
    rows = []
    for model, found in Stored(folder / "cpu-xeon-2-cores" / "memory-guide-guide-cpu.json").by("model").items():
        cells = [number(found[row][column]) for column in ("peak_mib", "kept_mib") for row in shown]
        rows.append([model, *cells])
    return markdown(header, rows)


def layers_gpu(folder: Path) -> str:
    """Times of one layer at a time on the large graph, for each order of the edges, with peak memory in brackets."""
    columns = {"random": "random edges", "sorted": "sorted edges"}
    path = folder / "nvidia-h200" / "layers-powerlaw-arxiv-cuda.csv"
    return _layers(path, columns, lambda row: (row["model"], row["order"]))


def layers_h100(folder: Path) -> str:
    """The same on an H100, with random edges, in two precisions."""
    path = folder / "nvidia-h100" / "layers-powerlaw-arxiv-cuda.csv"
    half = " bf16"

    def place(row: Mapping[str, str]) -> tuple[str, str]:
        return row["model"].removesuffix(half), "bf16" if row["model"].endswith(half) else "fp32"

    return _layers(path, {"fp32": "float32", "bf16": "bfloat16"}, place)


def _layers(path: Path, columns: Mapping[str, str], place: Callable[[Mapping[str, str]], tuple[str, str]]) -> str:
    """Returns a table with a line per layer. `place` gives the layer of a stored row, and its key in `columns`."""
    found: dict[str, dict[str, dict[str, Record]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            model, column = place(row)
            numbers = {name: float(row[name]) if row[name] else None for name in ("median_ms", "peak_mib")}
            found.setdefault(model, {}).setdefault(column, {})[row["row"]] = numbers
    header = ["layer"]
    for text in columns.values():
        header += [f"{text}: better torch.compile", "gnncompile", "over compile"]
    rows = []
    for model, given in found.items():
        cells = [model]
        for column in columns:
            cells += ["", "", ""] if column not in given else _against_compile(given[column])
        rows.append(cells)
    return markdown(header, rows)


def _against_compile(found: dict[str, Record]) -> list[str]:
    """Returns cells: the best row of `torch.compile`, gnncompile's row, and their ratio, or that over eager."""
    compiled, ours = best(found, COMPILE, "median_ms"), found["gnncompile"]
    ran = "fails" if compiled is None else with_memory(compiled, best(found, COMPILE, "peak_mib"))
    ratio = times(compiled, ours["median_ms"], 2)
    if compiled is None and "eager" in found:
        ratio = f"{times(found['eager']['median_ms'], ours['median_ms'], 1)} over eager"
    return [ran, with_memory(ours["median_ms"], ours["peak_mib"]), ratio]


def attention_gpu(folder: Path) -> str:
    """Times of attention and of a maximum alone, without linear layers, with peak memory in brackets."""
    rows = Stored(folder / "nvidia-h200" / "attention-cuda.json").rows
    other = Stored(folder / "nvidia-h100" / "attention-cuda.json").cases()
    shown = []
    for row in rows:
        of_other = other[row["graph"], row["model"], row["order"]]
        ours = with_memory(row["median_ms"], row["peak_mib"])
        shown.append([row["graph"], row["model"], ours, *_against_compile(of_other)])
    header = ["graph", "core", "H200: gnncompile", "H100: torch.compile", "gnncompile", "over compile"]
    return markdown(header, shown)


def serving_cpu(folder: Path) -> str:
    """Latencies of a served model on a CPU: medians of one client."""
    shown = {
        "torch.compile": "torch.compile",
        "AOTInductor": "AOTInductor",
        "package": "package",
        "package with kept layout": "package, layout kept",
    }
    return _latencies(Stored(folder / "cpu-epyc-2-cores" / "serving-cpu.json"), shown)


def serving_gpu(folder: Path) -> str:
    """Latencies of a served model on each GPU with stored results, medians and p99 of one client; empty without one."""
    shown = {
        "eager": "eager",
        "torch.compile": "torch.compile",
        "torch.compile reduce-overhead": "`reduce-overhead` of torch",
        "AOTInductor": "AOTInductor",
        "gnncompile": "gnncompile in the process",
        "package": "package",
        "package with kept layout": "package, layout kept",
        "AOTInductor in C++": "AOTInductor in C++",
        "package in C++": "package in C++",
        "package with kept layout in C++": "package in C++, layout kept",
    }
    parts = []
    for path in sorted(folder.glob("*/serving-cuda.json")):
        stored = Stored(path)
        versions = ", ".join(f"{name} {stored.environment[name]}" for name in ("torch", "triton"))
        parts.append(f"{stored.environment['gpu']}; {versions}:\n\n{_latencies(stored, shown, with_p99=True)}")
    head = (
        "Microseconds of an answer on a GPU, the median of one client, and in brackets the time of 99 of 100 answers. "
        "The inputs are in its memory before the time begins, and the time ends when the answer is complete there. A "
        "package is made once for each model, with the first request of the first case as its example."
    )
    return "\n\n".join([head, *parts]) if parts else ""


def _latencies(stored: Stored, shown: Mapping[str, str], with_p99: bool = False) -> str:
    """Returns a table of microseconds of one client.

    Args:
        stored: the results.
        shown: the head of the column for each row of the results. A row that was never measured has no column.
        with_p99: whether the time within which 99 of 100 answers come follows in brackets.
    """
    cases = {name: rows for (name, clients), rows in stored.cases(("case", "clients")).items() if clients == 1}
    names = [name for name in shown if any(name in rows for rows in cases.values())]

    def cell(record: Record | None) -> str:
        if record is None or record["status"] != "ok":
            return "" if record is None else str(record["status"]).lower()
        return f"{record['p50_us']:,.0f}" + (f" ({record['p99_us']:,.0f})" if with_p99 else "")

    lines, last = [], ""
    for case in CASES:
        if case.name in cases:
            request = case.workload.text if case.workload.text != last else ""
            lines.append([request, case.model_name, *(cell(cases[case.name].get(name)) for name in names)])
            last = case.workload.text
    return markdown(["request", "model", *(shown[name] for name in names)], lines)


def _three(found: dict[str, Record]) -> tuple[float | None, float | None, float | None]:
    """Returns the medians of eager, of the best row of `torch.compile`, and of gnncompile."""
    return found["eager"]["median_ms"], best(found, COMPILE, "median_ms"), found["gnncompile"]["median_ms"]


def _cells(values: Sequence[Any]) -> list[str]:
    return [value if isinstance(value, str) else number(value) for value in values]


TABLES: dict[str, Callable[[Path], str]] = {
    "steps": steps,
    "minibatch": minibatch,
    "compile-time": compile_time,
    "powerlaw": power_law,
    "guide-gpu": guide_gpu,
    "layers-gpu": layers_gpu,
    "layers-h100": layers_h100,
    "attention-gpu": attention_gpu,
    "memory-cpu": memory_cpu,
    "guide-cpu": guide_cpu,
    "serving-cpu": serving_cpu,
    "serving-gpu": serving_gpu,
}
"""The tables that a marker may name."""
