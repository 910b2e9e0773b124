"""Makes docs/benchmarks.md: all stored results, one line per case, one column per way to run it."""

from pathlib import Path

from benchmarks.reporting.readme_tables import markdown, with_memory
from benchmarks.reporting.stored import Record, Stored

QUANTITIES = {
    "median_ms": "median ms",
    "us": "us per call",
    "p50_us": "median microseconds of an answer",
    "p99_us": "microseconds within which 99 of 100 answers come",
    "step_ms": "median ms of a step",
    "loop_ms": "ms of a mini-batch in the whole loop",
    "epoch_s": "seconds of an epoch, loading included",
    "loading_s": "seconds of an epoch of loading alone",
    "edge_ns": "nanoseconds of CPU time per sampled edge, the sampler alone in one thread",
    "cold_seconds": "seconds of the first step, caches empty",
    "second_seconds": "seconds of the first step in a second process",
    "peak_mib": "peak MiB of forward and backward",
    "kept_mib": "MiB kept from the forward for the backward",
}
"""The columns of results that are shown, each in its own table, with their descriptions."""

HEAD = """# Everything measured

Made by `python -m benchmarks report` from [benchmarks/results](../benchmarks/results), where each row's quantiles and
counts stand too. Peak memory, where it was measured beside the time, is in brackets, MiB; a row of CUDA graphs has none
where its memory was taken before. Empty: not measured.
"""


def page(folder: Path) -> str:
    """Returns the page of all results in a folder."""
    parts = [HEAD]
    for machine in sorted(path for path in folder.iterdir() if path.is_dir()):
        stored = sorted(machine.glob("*.json"))
        parts += [f"## {machine.name}\n"] if stored else []  # some folders hold only texts that other pages link
        parts += [section(Stored(path)) for path in stored]
    return "\n".join(parts)


def section(stored: Stored) -> str:
    """Returns the tables of one file."""
    environment = stored.environment
    machine = environment.get("gpu") or environment["cpu"]
    versions = [f"{name} {environment[name]}" for name in ("torch", "triton", "torch-geometric") if name in environment]
    lines = [f"### {stored.path.stem}\n", f"{machine}; {environment['system']}; {', '.join(versions)}.\n"]
    commits = list(dict.fromkeys(str(row["commit"]) for row in stored.rows if row.get("commit")))
    commit = ", ".join(commits) or environment["commit"]
    lines.append(f"`{environment['command']}`, {environment['date']}, commit {commit}.\n")
    for column, what in QUANTITIES.items():
        beside_time = column == "peak_mib" and any("median_ms" in row for row in stored.rows)
        if not beside_time and any(row.get(column) is not None for row in stored.rows):
            lines.append(f"{what[0].upper()}{what[1:]}:\n\n{_table(stored, column)}\n")
    return "\n".join(lines)


def _table(stored: Stored, column: str) -> str:
    names = list(dict.fromkeys(row["row"] for row in stored.rows))
    cases = [
        [*map(str, case), *(_cell(rows.get(name), column) for name in names)] for case, rows in stored.cases().items()
    ]
    return markdown([*stored.columns, *names], cases)


def _cell(row: Record | None, column: str) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return str(row["status"]).lower()
    peak = row.get("peak_mib") if column == "median_ms" else None
    return with_memory(row.get(column), peak)
