"""What the backend of a Dynamo trace tells the code that Dynamo traces."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator


class CaptureSettings:
    """The base of gnncompile's backends. The defaults hold for all other backends too.

    Attributes:
        self_loops: How removed self loops are traced: "masked", "exact", or "off" (all PyG code is traced as written).
        attaches_sizes: Whether the caller can attach a missing number of segments to an argument and trace again.
        asked: The inputs whose number of segments was requested. Only a backend that attaches sizes has them.
        makes_matrices: Whether sparse matrices that the model makes are captured.
        captures_gradients: Whether a call of ``torch.autograd.grad`` in the model is part of the captured graph.
        watched: Layers whose hooks are checked before each call.
    """

    self_loops: str = "off"
    attaches_sizes: bool = False
    asked: set[tuple[str, bool]]
    makes_matrices: bool = False
    captures_gradients: bool = False
    watched: Container[nn.Module] = ()

    def note_break(self, reason: str, trace: str) -> None:
        """Called at each graph break. `trace` is the stack of the user's code, as Python prints it."""


_OF_OTHERS = CaptureSettings()


def current_settings() -> CaptureSettings:
    """Returns the settings of the backend that the running Dynamo trace compiles for."""
    return settings_of(InstructionTranslator.current_tx().output.compiler_fn) or _OF_OTHERS


def is_ours() -> bool:
    """Whether the running Dynamo trace compiles for a backend of gnncompile."""
    return current_settings() is not _OF_OTHERS


def settings_of(backend: Any) -> CaptureSettings | None:
    """Returns a backend without torch's wrappers around it; None if it is not gnncompile's."""
    while True:
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        if inner is None or inner is backend:
            return backend if isinstance(backend, CaptureSettings) else None
        backend = inner
