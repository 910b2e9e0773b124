"""The rooms of the package: none imports a later one, no module imports itself by way of others, files stay short."""

from __future__ import annotations

import ast
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[2]

ORDER = (
    ("exc", "forks", "tile_sizes"),
    ("half_sizes", "loop_sizes"),
    ("tuning",),
    ("device",),
    ("_compat", "debug_dir", "testing"),
    ("options", "ir"),
    ("layout",),
    ("codegen",),
    ("runtime",),
    ("ops",),
    ("cudagraphs",),
    ("substitutes",),
    ("passes",),
    ("capture",),
    ("sampling", "serving"),
    ("batches", "partitioning", "steps"),
    ("report",),
    ("support",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""The rooms, and the modules beside them: each imports from earlier lines, or from itself."""

LONGEST_FILE, LONGEST_FUNCTION, LONGEST_KERNEL = 500, 60, 120


def _files() -> dict[str, Path]:
    """All modules by name; a package is named after its folder."""
    files = sorted((ROOT / "gnncompile").rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return dict(zip(names, files, strict=True))


def imports(source: str, names: set[str]) -> set[str]:
    """The modules among `names` that a source file imports, under ``TYPE_CHECKING`` and in functions as well."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in names else str(node.module))
    return found & names


FILES = _files()
EDGES = {name: imports(file.read_text(encoding="utf-8"), set(FILES)) for name, file in FILES.items()}


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_every_room_has_a_place():
    assert {_room(name) for name in FILES} == {room for line in ORDER for room in line}


def test_no_room_imports_a_later_one():
    place = {room: at for at, line in enumerate(ORDER) for room in line}
    back = [
        f"{module} imports {other}"
        for module, found in EDGES.items()
        for other in found
        if _room(module) != _room(other) and place[_room(other)] >= place[_room(module)]
    ]
    assert back == []


def test_no_module_imports_itself_by_way_of_others():
    graph = nx.DiGraph([(module, other) for module, found in EDGES.items() for other in found])
    circles = [sorted(found) for found in nx.strongly_connected_components(graph) if len(found) > 1]
    assert circles == []


def test_imports_are_found_wherever_they_stand():
    source = "def f():\n    from a.b import c\n    import d\nif TYPE_CHECKING:\n    from a import b\n"
    assert imports(source, {"a.b", "a.b.c", "d", "e"}) == {"a.b.c", "d", "a.b"}


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(function.body) > 1
    start = first.end_lineno if told else function.lineno - 1
    return (function.end_lineno or 0) - (start or 0)


def _most(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    is_kernel = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return LONGEST_KERNEL if is_kernel else LONGEST_FUNCTION


@pytest.mark.parametrize("folder", ["gnncompile", "models", "transforms"])
def test_files_and_functions_are_short(folder: str):
    long = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        lines = len(source.splitlines())
        long += [f"{file.relative_to(ROOT)}: {lines} lines"] if lines > LONGEST_FILE else []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                long += [f"{file.name}: {node.name} has {_length(node)} lines"] if _length(node) > _most(node) else []
    assert long == []
