"""Tables made from stored results, and the comparison of two files of results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import __main__
from benchmarks.commands import report
from benchmarks.reporting.figures import Group, bars
from benchmarks.reporting.readme_tables import TABLES, markdown, number, times
from benchmarks.reporting.stored import Stored, best

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


# -- report -------------------------------------------------------------------------------------------------------


def test_readme_and_docs_are_what_report_writes():
    for path, text in report.made(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `python -m benchmarks report`"


def test_every_table_is_used_once():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in report.WITH_TABLES]
    assert sorted(match.group(2) for text in texts for match in report.MARKED.finditer(text)) == sorted(TABLES)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What report reads and writes, in a folder of its own."""
    shutil.copytree(RESULTS, tmp_path / "benchmarks" / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_a_changed_result_changes_tables_and_nothing_else(copy: Path, capsys: pytest.CaptureFixture[str]):
    command = ["report", "--root", str(copy)]
    assert __main__.main([*command, "--check"]) == 1 and not (copy / "docs").exists()
    assert __main__.main(command) == 0 and __main__.main([*command, "--check"]) == 0
    page = (copy / "docs" / "benchmarks.md").read_text()
    path = copy / "benchmarks" / "results" / "cpu-xeon-2-cores" / "guide-guide-cpu.json"
    stored = json.loads(path.read_text())
    for row in stored["rows"]:
        if (row["model"], row["row"]) == ("GIN", "gnncompile"):
            row["median_ms"] = 4.2
    path.write_text(json.dumps(stored))
    before = (copy / "README.md").read_text().splitlines()
    capsys.readouterr()
    assert __main__.main(command) == 0
    written = capsys.readouterr().out.splitlines()
    assert written == ["written: README.md", "written: docs/benchmarks.md", "written: docs/figures/speed-cpu.svg"]
    changed = [(old, new) for old, new in zip(before, (copy / "README.md").read_text().splitlines(), strict=True)]
    ((old, new),) = [(old, new) for old, new in changed if old != new]
    assert old.startswith("| GIN | 276 | 276 | 41.1") and new.startswith("| GIN | 276 | 276 | 4.20 | 66x | 66x |")
    assert (copy / "docs" / "benchmarks.md").read_text().replace("4.20 (21)", "41.1 (21)") == page


def test_latencies_on_a_gpu_stand_where_they_are_stored(tmp_path: Path):
    assert TABLES["serving-gpu"](tmp_path) == ""

    def latency(case: str, name: str, clients: int, p50: float | None, status: str = "ok") -> dict[str, Any]:
        times = {"p50_us": p50, "p99_us": p50 and 2 * p50}
        return {"case": case, "clients": clients, "row": name, "status": status, **times}

    rows = [
        latency("GAT-guide", "eager", 1, 1234.4),
        latency("GAT-guide", "eager", 4, 1.0),
        latency("GAT-guide", "package", 1, 99.6),
        latency("GCN-guide", "eager", 1, 1000.0),
        latency("GCN-guide", "package", 1, None, "FAILED"),
        latency("GCN-single", "package", 1, 7.0),
    ]
    (tmp_path / "card").mkdir()
    environment = {"gpu": "NVIDIA H100, 80 GiB, CUDA 12.8", "torch": "2.11.0", "triton": "3.6.0"}
    (tmp_path / "card" / "serving-cuda.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    assert TABLES["serving-gpu"](tmp_path).splitlines()[2:] == [
        "NVIDIA H100, 80 GiB, CUDA 12.8; torch 2.11.0, triton 3.6.0:",
        "",
        "| request | model | eager | package |",
        "|---|---|---|---|",
        "| 10,000 nodes, 200,000 edges | GCN | 1,000 (2,000) | failed |",
        "| | GAT | 1,234 (2,469) | 100 (199) |",
        "| 30 nodes, 64 edges | GCN | | 7 (14) |",
    ]


def test_figures():
    svg = bars("a < b", [Group("GCN & co", (30.0, 20.0, 0.001)), Group("GAT", (10.0, 5.0, 2.0))])
    root = ElementTree.fromstring(svg)
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a < b" and "GCN & co" in texts and "2.00 ms, 2.5x over torch.compile" in texts
    widths = [float(node.get("width")) for node in root.iter("{http://www.w3.org/2000/svg}rect")][4:]
    assert widths[0] == max(widths) and widths[1] == pytest.approx(widths[0] * 2 / 3, abs=0.1) and widths[2] == 1
    height = float(root.get("height"))
    assert all(float(node.get("y")) < height for node in root.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- benchmarks: nope -->\n\n<!-- end -->", "marker: got nope"),
        ("<!-- benchmarks: steps -->\n| |\n", "has no `<!-- end -->`"),
        ("<!-- benchmarks: steps -->\n\n<!-- benchmarks: powerlaw -->\n\n<!-- end -->", "has no `<!-- end -->`"),
    ],
)
def test_markers_that_are_wrong(text: str, said: str):
    with pytest.raises(ValueError, match=said):
        report.with_tables(text, RESULTS)


def test_cells():
    assert [number(value) for value in (0.155, 9.996, 10.04, 99.96, 627.02, None)] == [
        "0.15",
        "10.0",
        "10.0",
        "100",
        "627",
        "",
    ]
    assert times(10.0, 4.0) == "2.5x" and times(627.0, 22.6) == "28x" and times(1.0, None) == ""
    assert times(10.0, 4.0, 2) == "2.50x"
    assert markdown(["", "a"], [["x", ""]]) == "| | a |\n|---|---|\n| x | |"
    rows = {"a": {"ms": None}, "b": {"ms": 2.0}, "c": {"ms": 1.0}}
    assert best(rows, ("a", "b"), "ms") == 2.0 and best(rows, ("a", "d"), "ms") is None


def test_stored_results_that_are_none(tmp_path: Path):
    for text in ("", "[]", '{"rows": []}'):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ValueError, match=r"r\.json: .*expected the JSON that a benchmark writes"):
            Stored(tmp_path / "r.json")
    with pytest.raises(ValueError, match="FileNotFoundError"):
        Stored(tmp_path / "nope.json")


# -- compare ------------------------------------------------------------------------------------------------------


def row(name: str, ms: float | None, **others: Any) -> dict[str, Any]:
    return {"graph": "guide", "model": "GCN", "row": name, "status": "ok", "median_ms": ms, **others}


def write(path: Path, rows: list[dict[str, Any]], **facts: str) -> str:
    path.write_text(json.dumps({"environment": {"cpu": "one", **facts}, "rows": rows}))
    return str(path)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (row("a", 1.0), row("a", 1.09), "same"),
        (row("a", 1.0), row("a", 1.11), "worse"),
        (row("a", 1.0), row("a", 0.5), "better"),
        (row("a", 1.0), row("a", None, status="WRONG"), "worse"),
        (row("a", None, status="FAILED"), row("a", 1.0), "better"),
        (row("a", 1.0, peak_mib=10.0), row("a", 1.0, peak_mib=10.9), "same"),
        (row("a", 1.0, peak_mib=10.0), row("a", 1.0, peak_mib=12.0), "worse"),
        (row("a", 1.0, peak_mib=-3.0), row("a", 1.0, peak_mib=12.0), "same"),
        (row("a", None, us=7.0), row("a", None, us=70.0), "worse"),
        (row("a", 1.0, device_ms=0.5), row("a", 1.0, device_ms=0.6), "worse"),
    ],
)
def test_what_got_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str], before: Any, after: Any, verdict: str):
    same = row("same", 5.0)
    files = write(tmp_path / "a.json", [before, same]), write(tmp_path / "b.json", [same, after])
    assert __main__.main(["compare", *files]) == int(verdict == "worse")
    assert verdict in capsys.readouterr().out
    assert __main__.main(["compare", *files, "--rows", "same"]) == 0
    capsys.readouterr()
    assert __main__.main(["compare", *files, "--json"]) == int(verdict == "worse")
    found = [change["verdict"] for change in json.loads(capsys.readouterr().out) if change["row"] == "a"]
    assert found[0] == verdict
    assert __main__.main(["compare", *files, "--threshold", "100"]) == int(after["status"] != "ok")


def test_chosen_quantities(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = write(tmp_path / "a.json", [row("a", 1.0, device_ms=0.5), row("b", 1.0)])
    second = write(tmp_path / "b.json", [row("a", 2.0, device_ms=0.5), row("b", None, status="WRONG")])
    assert __main__.main(["compare", first, second, "--quantities", "device ms", "--rows", "a"]) == 0
    assert __main__.main(["compare", first, second, "--quantities", "device ms"]) == 1  # a failure always counts
    capsys.readouterr()
    assert __main__.main(["compare", first, second, "--quantities", "device ms,ms", "--rows", "a"]) == 1
    assert __main__.main(["compare", first, second, "--quantities", "speed"]) == 2
    assert "--quantities: got speed, expected some of ms" in capsys.readouterr().err


def test_rows_of_one_file_and_of_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = write(tmp_path / "a.json", [row("a", 1.0), row("old", 1.0), row("a", 9.0, order="sorted")])
    second = write(tmp_path / "b.json", [row("a", 1.0), row("new", 1.0), row("a", 9.0, order="sorted")], cpu="two")
    assert __main__.main(["compare", first, second]) == 0
    said = capsys.readouterr()
    assert "gone" in said.out and "new" in said.out and "2 of 4 much the same" in said.out
    assert "cpu: one, then two" in said.err


def test_compare_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = write(tmp_path / "a.json", [row("a", 1.0)])
    for other, more in (
        (str(tmp_path / "nope.json"), []),
        (write(tmp_path / "b.json", [row("b", 1.0)]), []),
        (first, ["--threshold", "0.5"]),
    ):
        assert __main__.main(["compare", first, other, *more]) == 2
        assert "expected" in capsys.readouterr().err


def test_every_stored_file_equals_itself():
    for path in RESULTS.glob("*/*.json"):
        assert __main__.main(["compare", str(path), str(path)]) == 0
