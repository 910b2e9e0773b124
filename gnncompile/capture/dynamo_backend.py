"""``torch.compile(model, backend="gnncompile")``: torch imports this module when it is first asked for the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from gnncompile import _compat
from gnncompile._compat import Setting
from gnncompile.capture.backend import Backend, prepare_torch
from gnncompile.exc import CaptureError
from gnncompile.options import resolve

_MESSAGES = {
    (Setting.SELF_LOOPS, "exact"): (
        "{line}: {what} reads edges whose self loops were removed. "
        "Use gnncompile.compile(model), which captures such a model with exact sizes."
    ),
    (Setting.SELF_LOOPS, "off"): (
        "{what} of the model can't be captured as it is: {reason}. "
        "Use gnncompile.compile(model), which captures such a model as PyG wrote it."
    ),
    (Setting.GRADIENTS, False): (
        "torch.autograd.grad of the model can't be captured: {reason}. Use gnncompile.compile(model), which "
        "breaks the graph there, or leave torch._dynamo.config.trace_autograd_ops off."
    ),
}
"""The errors for the user if a setting would have to change: ``torch.compile`` can't capture again with another one."""

_OTHERWISE = "{reason}. Use gnncompile.compile(model), which captures such a model in another way."


class TorchBackend(_compat.CaptureSettings):
    """The backend of ``torch.compile(model, backend="gnncompile")``: the same passes as :func:`gnncompile.compile`."""

    self_loops = "masked"

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Compiles one captured graph.

        The inputs are not taken apart, so a graph without edges may cost a second capture.

        Raises:
            CaptureError: The graph can only be captured by :func:`gnncompile.compile`.
        """
        options, inductor = resolve(kwargs.get("mode"), kwargs.get("options"))
        try:
            return Backend(options, inductor)(gm, inputs)
        except _compat.Recapture as asked:
            message = _MESSAGES.get((asked.setting, asked.value), _OTHERWISE)
            raise CaptureError(message.format(what=asked.what, reason=asked.reason, line=asked.line)) from None


backend = TorchBackend()
prepare_torch()  # must run before torch traces a model for this backend
