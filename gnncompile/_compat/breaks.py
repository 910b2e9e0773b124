"""Tells why and where Dynamo breaks graphs."""

from __future__ import annotations

import functools
import traceback
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from gnncompile._compat.capture_settings import settings_of


def patch_log_graph_break() -> None:
    """Makes Dynamo call ``note_break`` of gnncompile's backends at each graph break."""
    log: Any = InstructionTranslatorBase.log_graph_break

    @functools.wraps(log)
    def log_graph_break(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend = settings_of(self.output.compiler_fn)
        if backend is not None:
            given = [*args, *kwargs.values()]
            backend.note_break(_reason(given), _trace(given, self))
        return log(self, *args, **kwargs)

    setattr(InstructionTranslatorBase, log.__name__, log_graph_break)


def _error(given: list[Any]) -> BaseException | None:
    """Returns the exception raised at the break, or None. Torch 2.11 and later log the exception with the break."""
    return next((value for value in given if isinstance(value, BaseException)), None)


def _reason(given: list[Any]) -> str:
    """Returns the first line of Dynamo's message, and its explanation if there is one."""
    error = _error(given)
    text = (
        str(getattr(error, "msg", error)) if error is not None else next((v for v in given if isinstance(v, str)), "")
    )
    lines = [line.strip() for line in text.strip().splitlines()]
    why = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    reason = ". ".join(part.rstrip(".") for part in (*lines[:1], why) if part)
    return reason.partition(" (unhinted:")[0]  # names of symbols, which differ in each attempt


def _trace(given: list[Any], translator: Any) -> str:
    """Returns the location of the break: the traced frames of the user's code, the innermost last."""
    stack = getattr(_error(given), "real_stack", None)
    if not stack:
        stack = next((v for v in given if isinstance(v, traceback.StackSummary)), None)
    if not stack:
        stack = torch._guards.TracingContext.extract_stack()
    frames = list(stack) or [translator.frame_summary()]
    return "".join(traceback.format_list(frames))
