"""Notices when a model asks whether a tensor is empty, which torch would answer without a guard."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch._dynamo.symbolic_convert as symbolic_convert
from torch import fx
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from gnncompile._compat.compiles import compiling
from gnncompile._compat.dynamo import calling_file
from gnncompile._compat.recapture import Recapture, Setting
from gnncompile._compat.shapes import make_special


def _asks_for_emptiness() -> Recapture:
    """Returns what to raise if a model asks whether one of its tensors is empty."""
    return Recapture(Setting.EMPTY_SIZES, True, "the model asks whether a tensor is empty")


def patch_evaluate_expr(libraries: tuple[str, ...]) -> None:
    """Makes compiles inside :class:`symbolic_counts` raise :class:`Recapture` unless empty sizes are special.

    They raise it if a model asks whether a tensor is empty. Torch assumes that symbols of sizes are positive, even if
    told that 0 is not special. It would answer ``n > 0`` and ``if n`` without a guard, and would replace ``max(n, 1)``
    by ``n``.

    Args:
        libraries: Folders of library code whose questions are ignored. Such code saves work on empty tensors, or looks
            for a maximum, for which gnncompile has other ways.
    """
    create = SymNodeVariable.create.__func__  # type: ignore[attr-defined]

    def notice(node: fx.Node, result: Any, file: Callable[[], str]) -> None:
        if not compiling.calls or compiling.empty_is_special or not _is_wrong_for_empty(node, result):
            return
        if not (isinstance(result, (bool, torch.SymBool)) and left_alone(file())):
            raise _asks_for_emptiness()

    def left_alone(file: str) -> bool:
        return file.startswith(libraries) and "polyfills" not in file  # the user's built-ins are traced as polyfills

    def watched_create(cls: Any, tx: Any, proxy: Any, *args: Any, **kwargs: Any) -> Any:
        made = create(cls, tx, proxy, *args, **kwargs)
        if made.is_python_constant():
            notice(proxy.node, made.as_python_constant(), lambda: tx.f_code.co_filename)
        else:
            notice(proxy.node, made.sym_num, lambda: calling_file(skip=""))
        return made

    def watched_bool(size: Any) -> bool:
        tested: Any = sys._getframe(1).f_locals
        number = getattr(tested.get("value"), "sym_num", None)
        watching = compiling.calls and not compiling.empty_is_special
        asks = watching and isinstance(number, torch.SymInt) and _may_be_empty(number)
        if asks and not left_alone(tested["self"].f_code.co_filename):
            raise _asks_for_emptiness()
        return bool(guard(size))

    def watched_evaluation(self: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
        found = evaluate(self, expr, *args, **kwargs)
        watching = compiling.calls and not compiling.empty_is_special
        if watching and isinstance(expr, sympy.Expr) and expr.free_symbols and sympy.Eq(expr, found) == sympy.false:
            raise _asks_for_emptiness()  # the guard would never hold: positive sizes do not give the value for size 0
        if compiling.calls and isinstance(expr, sympy.Rel):
            _hold_small_sizes(self, expr if found else sympy.Not(expr))
        return found

    evaluate = ShapeEnv.evaluate_expr
    ShapeEnv.evaluate_expr = watched_evaluation  # type: ignore[method-assign,assignment]
    SymNodeVariable.create = classmethod(watched_create)  # type: ignore[method-assign,assignment]
    guard: Any = getattr(symbolic_convert, "guard_bool", None)  # called by an `if` on a size
    if guard is not None:
        symbolic_convert.guard_bool = watched_bool  # type: ignore[attr-defined,assignment]
    _patch_answers(left_alone)


def _hold_small_sizes(environment: ShapeEnv, relation: sympy.Rel) -> None:
    """Replaces sizes by the number 1 or 0 if a relation, which is a guard from now on, leaves them no other value.

    Torch keeps the symbol of a size of which 1 is not special, with a range up to 2. A tensor of such a size would be
    broadcast as one row, while its elements would be read as those of several rows. If the relation leaves both
    numbers, a further guard decides which.
    """
    sizes = (relation.free_symbols & environment.size_like) - free_unbacked_symbols(relation)
    held = {size for size in sizes if environment.var_to_range[size].upper <= 2}
    if not held:
        return
    make_special(environment, held)
    environment._refine_ranges(relation)
    for size in held:
        if environment.var_to_range[size].upper == 1:
            environment.evaluate_expr(sympy.Eq(size, 1))


def _patch_answers(left_alone: Callable[[str], bool]) -> None:
    """Answers a library's question whether a data-dependent size is 0. Torch would break the graph there."""
    answer = SymNodeVariable.evaluate_expr

    def watched(self: Any, *args: Any) -> Any:
        found = _if_not_empty(self.sym_num) if compiling.calls and not compiling.empty_is_special else None
        return answer(self, *args) if found is None or not left_alone(calling_file(skip="")) else found

    SymNodeVariable.evaluate_expr = watched  # type: ignore[method-assign,assignment]


def _if_not_empty(question: Any) -> bool | None:
    """The answer to whether a data-dependent size is 0 for a size that is not; None for other questions.

    Torch has no answer. For other sizes it would assume that they are positive.
    """
    asked = question.node.expr if isinstance(question, torch.SymBool) else None
    is_zero = isinstance(asked, (sympy.Eq, sympy.Ne)) and 0 in asked.args and free_unbacked_symbols(asked)
    return isinstance(asked, sympy.Ne) if is_zero else None


_SYMBOLIC = (torch.SymInt, torch.SymBool, torch.SymFloat)


def _symbols(number: Any) -> set[Any]:
    """Returns the symbols of sizes in a symbolic number. Torch assumes that they are positive."""
    if not isinstance(number, _SYMBOLIC):
        return set()
    return {s for s in getattr(number.node.expr, "free_symbols", ()) if s.is_positive}


def _may_be_empty(number: torch.SymInt) -> bool:
    """Whether a size that torch takes for positive is 0 if all its symbols are 0."""
    symbols = _symbols(number)
    try:
        return bool(symbols) and _at(number, dict.fromkeys(symbols, 0)) == 0
    except (ArithmeticError, TypeError, ValueError):
        return True


def _at(number: Any, sizes: Mapping[Any, int]) -> Any:
    """Returns the value of a number for these sizes."""
    if not isinstance(number, _SYMBOLIC):
        return number
    found = number.node.expr.xreplace({s: sympy.Integer(n) for s, n in sizes.items()})
    kind: Any = number.node.pytype
    return kind(found)


def _is_wrong_for_empty(node: fx.Node, result: Any) -> bool:
    """Whether the result of an operation on sizes would be wrong if some of the sizes were 0."""
    if node.op not in ("call_function", "call_method") or node.kwargs:
        return False
    args = fx.map_arg(node.args, lambda n: n.meta.get("example_value"))
    if not all(isinstance(a, (bool, int, float, torch.SymInt, torch.SymFloat)) for a in args):
        return False
    symbols = set().union(*map(_symbols, args))
    target: Any = node.target if node.op == "call_function" else getattr(operator, str(node.target), None)
    if not symbols or target is None:
        return False
    for empty in [{s} for s in symbols] + [symbols]:
        sizes = {s: 0 if s in empty else _ORDINARY for s in _all_symbols([*args, result])}
        try:
            if target(*(_at(a, sizes) for a in args)) != _at(result, sizes):
                return True
        except (ArithmeticError, TypeError, ValueError):  # an error for empty sizes, in eager too
            continue
    return False


_ORDINARY = 7
"""An example of a size that is not special."""


def _all_symbols(numbers: Sequence[Any]) -> set[Any]:
    symbolic = [n.node.expr for n in numbers if isinstance(n, _SYMBOLIC)]
    return set().union(*(getattr(expr, "free_symbols", ()) for expr in symbolic))
