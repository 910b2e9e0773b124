"""docs/api.md: the signatures and docstrings of all public names, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.writer.docstrings import markdown


@dataclass(frozen=True)
class Part:
    """A part of the page.

    Attributes:
        title: Its heading.
        file: Whose docstring introduces it, and whose `__all__` it has where `names` is None.
        names: Public names that no module exports: those of objects that others return.
    """

    title: str
    file: str
    names: tuple[str, ...] | None = None


SAMPLED = ("BoundedSampler", "BoundedNeighborhood")

PARTS = (
    Part("gnncompile", "gnncompile/__init__.py"),
    Part("What a report holds", "gnncompile/report/explain.py", ("RegionReport", "KernelReport")),
    Part("", "gnncompile/report/traffic.py", ("Work",)),
    Part("", "gnncompile/passes/log.py", ("Skip",)),
    Part("", "gnncompile/report/model_graph.py", ("ModelGraph", "Box", "Operation")),
    Part("gnncompile.sampling.pyg", "gnncompile/sampling/pyg.py", ("NeighborSampler",)),
    Part("gnncompile.exc", "gnncompile/exc.py"),
    Part("gnncompile.transforms", "transforms/__init__.py"),
    Part("What prepare reports", "transforms/prepare.py", ("Moved", "Left")),
    Part("gnncompile.models", "models/__init__.py"),
    Part("gnncompile.sampling.bounded", "gnncompile/sampling/bounded.py", SAMPLED),
    Part("gnncompile.sampling.device", "gnncompile/sampling/device.py", ("sample_neighbors",)),
    Part("gnncompile.sampling.features", "gnncompile/sampling/features.py", ("Features", "FeatureReport", "Placed")),
    Part("gnncompile.sampling.reads", "gnncompile/sampling/reads.py", ("expected_reads", "expected_reads_hetero")),
    Part("gnncompile.sampling.gather", "gnncompile/sampling/gather.py", ("gather",)),
    Part("gnncompile.testing", "gnncompile/testing.py"),
)

HEAD = """# API reference

Made by `python -m docs` from signatures and docstrings; a test compares. Options are in
[debugging](debugging.md#switches), the command line in [start here](start.md#on-the-command-line).
"""

SETUPS = {
    "Loader": """import torch
from torch_geometric.loader import DataLoader
import gnncompile
from gnncompile import testing
from gnncompile.models import GCN
from gnncompile.transforms import prepare

data = testing.uniform(50, 300)
x, edge_index, y = data.x, data.edge_index, torch.randint(7, (50,))
model = GCN(16, 16, 2, 7)
optimizer = torch.optim.Adam(model.parameters())""",
    "loader": """from torch_geometric.nn import global_add_pool

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gnn = GCN(16, 16, 2, 7)

    def forward(self, x, edge_index, batch):
        return global_add_pool(self.gnn(x, edge_index), batch)

dataset = testing.molecules(256)
for molecule in dataset:
    molecule.y = molecule.y.long().clamp(max=6)
model = Classifier().to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.Adam(model.parameters())""",
    "NeighborSampler": """from torch_geometric.loader import NeighborLoader
from gnncompile.sampling.pyg import NeighborSampler

data = testing.uniform(50, 300)
data.edge_weight = torch.rand(300)""",
    "warmup": "model = GCN(16, 16, 2, 7)",
    "prepare": "model = GCN(16, 16, 2, 7)",
}
"""What the examples of a docstring rely on: hidden in front of an entry, and run with the page's blocks."""


Definition = ast.ClassDef | ast.FunctionDef


def page(root: Path) -> str:
    """The whole page."""
    lines = [HEAD]
    for part in PARTS:
        tree = _tree(root / part.file)
        if part.title:
            lines.append(f"## {part.title}\n")
        if part.names is None:
            lines += [f"{markdown(ast.get_docstring(tree) or '')}\n"]
        for name in part.names or _exported(tree):
            lines += _entry(*_found(root, root / part.file, name))
    return "\n".join(lines).rstrip() + "\n"


def public(root: Path) -> dict[str, list[str]]:
    """The names that each public module exports."""
    return {part.title: _exported(_tree(root / part.file)) for part in PARTS if part.names is None}


def _entry(name: str, node: Definition) -> Iterator[str]:
    yield f"### {name}\n"
    if name in SETUPS:
        yield f"<!-- setup\n{SETUPS[name]}\n-->\n"
    if isinstance(node, ast.FunctionDef):
        yield f"```text\n{_signature(name, node.args, node.returns)}\n```\n"
        yield f"{markdown(ast.get_docstring(node) or '')}\n"
        return
    arguments = _constructor(node)
    if arguments is not None:
        yield f"```text\n{_signature(name, arguments, None)}\n```\n"
    yield f"{markdown(ast.get_docstring(node) or '')}\n"
    for member in node.body:
        doc = ast.get_docstring(member) if isinstance(member, ast.FunctionDef) else None
        if not isinstance(member, ast.FunctionDef) or (member.name.startswith("_") and member.name != "__call__"):
            continue
        if doc is None or _is_overridden(member):
            continue
        if any(isinstance(d, ast.Name) and d.id.endswith("property") for d in member.decorator_list):
            said = f"{member.name} -> {ast.unparse(member.returns)}" if member.returns else member.name
        else:
            said = _signature(member.name, member.args, member.returns)
        yield f"```text\n{name}.{said}\n```\n"
        yield f"{markdown(doc)}\n"


def _is_overridden(method: ast.FunctionDef) -> bool:
    """Whether a method is one of `nn.Module` or `BaseTransform` that says how an object prints."""
    return method.name == "extra_repr"


def _constructor(node: ast.ClassDef) -> ast.arguments | None:
    """Arguments of a class; those of a dataclass are its fields, and objects that are only returned have none."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return member.args
    return None


def _signature(name: str, arguments: ast.arguments, returns: ast.expr | None) -> str:
    """As it is written, on one line or with a line for each argument."""
    kept = [a for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
    defaults = [None] * (len(kept) - len(arguments.defaults)) + list(arguments.defaults)
    said = [_argument(a, d) for a, d in zip(kept, defaults, strict=True)]
    if arguments.vararg is not None:
        said.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        said.append("*")
    said += [_argument(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None:
        said.append(f"**{_argument(arguments.kwarg, None)}")
    result = f" -> {ast.unparse(returns)}" if returns is not None else ""
    line = f"{name}({', '.join(said)}){result}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in said), f"){result}"])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    said = argument.arg
    if argument.annotation is not None:
        said += f": {ast.unparse(argument.annotation)}"
    if default is not None:
        said += f" = {ast.unparse(default)}" if argument.annotation is not None else f"={ast.unparse(default)}"
    return said


def _exported(tree: ast.Module) -> list[str]:
    """The names of `__all__` but the version, in the order of a reader: as they stand there."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    raise ValueError("found no __all__, expected one in a public module")


def _found(root: Path, file: Path, name: str) -> tuple[str, Definition]:
    """The definition of a name in a file, or in the one that the file imports it from.

    Raises:
        ValueError: There is none.
    """
    tree = _tree(file)
    definitions = [n for n in tree.body if isinstance(n, Definition) and n.name == name]
    if definitions:
        return name, definitions[-1]  # behind its overloads
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            return _found(root, _file(root, file, node), name)
    raise ValueError(f"{file}: found no definition of {name}, expected the one that its __all__ names")


def _file(root: Path, file: Path, node: ast.ImportFrom) -> Path:
    parts = (node.module or "").split(".")
    folder = file.parent if node.level == 1 else root
    path = folder.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
