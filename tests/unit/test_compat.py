"""Every name of torch that we use is there, found by reading our source: a release that drops one fails here, by name.

Private API stands in ``gnncompile/_compat`` only, but for what torch's own guides tell everyone to import.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.sym_node import SymNode

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("gnncompile", "models", "transforms") for path in (ROOT / folder).rglob("*.py"))
COMPAT = [path for path in FILES if "_compat" in path.parts]

COMMON = ("torch.utils._pytree", "torch.utils._python_dispatch", "torch._ops", "torch._check", "torch._dynamo")
"""What may be used anywhere: named in torch's documentation of custom ops, modes and pass writing; ``_dynamo`` for
``disable`` and the exceptions it raises."""

ONLY_WITH_CUDA = "_cuda_"
"""Builds of torch for CPUs lack these."""

OF_OBJECTS: dict[str, Any] = {
    "_arch_flags": importlib.import_module("torch._inductor.cpu_vec_isa").VecAVX512,
    "_automatic_dynamic": importlib.import_module("torch._dynamo.variables.builder"),
    "_backward_hooks": torch.Tensor,
    "_backward_impl": importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers"),
    "_cdata": torch.UntypedStorage,
    "_check_requires_grad_intermediate_outputs": importlib.import_module("torch._dynamo.output_graph"),
    "_expr": SymNode,
    "_get_backend": torch.distributed.ProcessGroup,
    "_get_data_attr": torch._C._autograd,
    "_is_view": torch.Tensor,
    "_join_config": torch.distributed.algorithms.join.Join,
    "_native_batch_norm_legit": torch.ops.aten,
    "_native_batch_norm_legit_functional": torch.ops.aten,
    "_native_batch_norm_legit_no_training": torch.ops.aten,
    "_one_graph": importlib.import_module("torch._dynamo.convert_frame"),
    "_op_dk": torch._ops.OpOverload,
    "_post_accumulate_grad_hooks": torch.Tensor,
    "_refine_ranges": importlib.import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv,
    "_sequence_nr": torch.autograd.graph.Node,
    "_set_replacement": importlib.import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv,
    "_shape_env": importlib.import_module("torch._library.fake_impl").FakeImplCtx,
    "_torchdynamo_orig_backend": importlib.import_module("torch._dynamo.convert_frame"),
    "_torchdynamo_orig_callable": importlib.import_module("torch._dynamo.eval_frame"),
    "_update_var_to_range": importlib.import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv,
    "_validate_outputs_safe_for_autograd_nodes": importlib.import_module("torch._dynamo.output_graph"),
    "_unsafe_preserve_version_counter": torch.autograd,
    "_warned_capturable_if_run_uncaptured": importlib.import_module("torch.optim.optimizer"),
}
"""Private attributes of objects that `_compat` uses, and what has them."""


def imported(tree: ast.Module) -> Iterator[tuple[int, str, str, str | None]]:
    """Line, name in the file, module and name in it, of what a file imports of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield node.lineno, alias.asname or "torch", alias.name if alias.asname else "torch", None
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, node.module, alias.name


def found(module: str, name: str | None) -> Any:
    """What an import gives; raises as the import would."""
    holder = importlib.import_module(module)
    if name is None:
        return holder
    return getattr(holder, name) if hasattr(holder, name) else importlib.import_module(f"{module}.{name}")


def chain(node: ast.AST) -> list[str]:
    """``torch._C.x`` as its names; empty if it does not begin with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = chain(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before and isinstance(node, ast.Attribute) else []


def lacks(text: str) -> list[str]:
    """What torch does not have of the names that a source file uses without asking, one line each."""
    tree, problems, known = ast.parse(text), [], {}
    for line, alias, module, name in imported(tree):
        try:
            known[alias] = found(module, name)
        except (ImportError, AttributeError):
            problems.append(f"line {line}: torch {torch.__version__} has no {module}.{name or ''}".rstrip("."))
    for node in ast.walk(tree):
        names = chain(node) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) else []
        if not names or names[0] not in known:
            continue
        holder = known[names[0]]
        for at, name in enumerate(names[1:], 1):
            if not isinstance(holder, (types.ModuleType, type)) or holder is torch.ops:
                break
            if name.startswith(ONLY_WITH_CUDA) and not torch.backends.cuda.is_built():
                break
            if not hasattr(holder, name):
                problems.append(f"line {node.lineno}: torch {torch.__version__} has no {'.'.join(names[: at + 1])}")
                break
            holder = getattr(holder, name)
    return problems


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_torch_has_what_is_used(path: Path) -> None:
    assert not lacks(path.read_text())


def test_a_name_that_is_gone_is_told() -> None:
    text = """
import torch
from torch._dynamo import no_such_module
from torch._dynamo.source import NoSuchSource, TensorPropertySource as Source
import torch._inductor.nowhere as nowhere
value = torch._C._no_such_function(1) + Source.no_such_method()
torch.Tensor.no_such_patch = None
"""
    assert [problem.split(" has no ")[1] for problem in lacks(text)] == [
        "torch._dynamo.no_such_module",
        "torch._dynamo.source.NoSuchSource",
        "torch._inductor.nowhere",
        "torch._C._no_such_function",
        "Source.no_such_method",
    ]


def test_private_attributes_of_objects_are_known_and_there() -> None:
    used = set()
    for path in COMPAT:
        tree = ast.parse(path.read_text())
        aliases = {alias for _, alias, _, _ in imported(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr != "_getframe":
                names = chain(node)
                if not names or names[0] not in aliases:
                    used.add(node.attr)
    assert used == OF_OBJECTS.keys()
    for name, holder in OF_OBJECTS.items():
        there = hasattr(holder, name) or name in inspect.getsource(holder)
        assert there, f"torch {torch.__version__}: {holder} has no {name}, which gnncompile/_compat uses"


def test_private_api_stands_in_one_place() -> None:
    outside = []
    for path in FILES:
        if path in COMPAT:
            continue
        tree = ast.parse(path.read_text())
        names = [(line, f"{module}.{name}" if name else module) for line, _, module, name in imported(tree)]
        names += [
            (node.lineno, ".".join(chain(node)))
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and chain(node)[:1] == ["torch"] and chain(node)[1:2] != ["ops"]
        ]
        outside += [
            f"{path.relative_to(ROOT)}:{line}: {name}"
            for line, name in names
            if is_private(name)
            and not name.startswith(COMMON)
            and name != "torch._subclasses.FakeTensor"
            and not "torch._subclasses.FakeTensor".startswith(name)
        ]
    assert not outside


ERRORS = ("e", "err", "error", "exc", "exception", "failed", "failure", "problem", "reason")
"""The names that errors have."""


def texts_matched(source: str) -> list[int]:
    """The lines that look into the text of an error: ``"a" in str(error)``, ``re.search("a", str(error))``, ..."""

    def is_text(node: ast.AST) -> bool:
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"
        return called and any(isinstance(arg, ast.Name) and arg.id in ERRORS for arg in node.args)  # type: ignore[attr-defined]

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            compared = any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops)
            found += [node.lineno] * (compared and any(map(is_text, node.comparators)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            regex = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            part = node.func.attr in ("startswith", "endswith", "find", "index") and is_text(node.func.value)
            found += [node.lineno] * (part or (regex and any(map(is_text, node.args))))
    return found


def test_texts_of_errors_are_matched_in_one_place() -> None:
    assert texts_matched("if 'a' in str(error): pass") == texts_matched("str(error).startswith('a')") == [1]
    assert texts_matched("import re\nre.search('a', str(error))") == [2]
    assert texts_matched("'a' in error, str(error), 'a' in str(op)") == []
    found = {path.name for path in FILES if texts_matched(path.read_text(encoding="utf-8"))}
    assert found == {"errors.py"}


def test_a_broken_capture_is_known_by_its_code_or_text() -> None:
    is_broken = importlib.import_module("gnncompile._compat").is_broken_capture
    text = "CUDA error: operation failed due to a previous error during capture"
    for code in (900, 901):
        error: Any = torch.AcceleratorError(text)
        error.error_code = code
        assert is_broken(error) == (code == 901)
    assert is_broken(RuntimeError(text)) and is_broken(torch.AcceleratorError(text))
    assert not is_broken(ValueError(text)) and not is_broken(RuntimeError("operation not permitted"))


def test_files_of_compat_are_small_and_everything_is_exported() -> None:
    compat = importlib.import_module("gnncompile._compat")
    assert all(len(path.read_text().splitlines()) <= 400 for path in COMPAT)
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_sums_of_float64_are_none_of_float32() -> None:
    """A kernel of Inductor's that sums rows and columns at once has float32 accumulators."""
    compat = importlib.import_module("gnncompile._compat")
    index, single = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    assert compat.settings_for([index, single, 3]) == {}
    assert compat.settings_for([index, single.double()]) in ({"triton.mix_order_reduction": False}, {})
    assert bool(compat.settings_for([single.double()])) == hasattr(torch._inductor.config.triton, "mix_order_reduction")
