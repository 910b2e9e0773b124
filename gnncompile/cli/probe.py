"""`python -m gnncompile.cli.probe WHAT DEVICE`: compiles and runs a small model, and compares it with eager PyTorch.

Each trial of `doctor` runs in its own process, so that a crash or a hang ends no other trial. Also, Triton's
interpreter can only be chosen when Triton is imported. The last line on standard output is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

MODEL = "model"
"""A PyG model, compiled by the whole compiler, Inductor included."""

NATIVE = "native"
"""The C++ host code of replays. Every other value is the generator of a single kernel."""


def probe(what: str, device: str) -> dict[str, Any]:
    """Runs forward and backward on a graph with a hub and a node without edges.

    Args:
        what: :data:`MODEL`, :data:`NATIVE`, or a value of GNNCOMPILE_KERNELS: "triton", "cpp" or "reference".
        device: "cpu" or "cuda".

    Returns:
        ``ok``, ``message`` (the problem, or "") and ``seconds`` (of the first call, without imports).
    """
    import torch
    from torch_geometric.nn import GCNConv, SimpleConv

    import gnncompile
    from gnncompile.cudagraphs import native
    from gnncompile.runtime import launch

    start = time.perf_counter()
    if what == NATIVE:
        problem = native.wait()
        return {"ok": not problem, "message": problem, "seconds": time.perf_counter() - start}
    torch.manual_seed(0)
    layer = GCNConv(8, 8) if what == MODEL else SimpleConv("sum")
    layer = layer.to(device)
    options = {} if what == MODEL else {"inductor": False}
    x = torch.randn(50, 8, device=device)
    edge_index = torch.randint(49, (2, 400), device=device)
    edge_index[1, :200] = 0
    start = time.perf_counter()
    found = _results(gnncompile.compile(layer, options=options), x, edge_index)
    seconds = time.perf_counter() - start
    if launch.fallbacks:
        return {"ok": False, "message": next(iter(launch.fallbacks.values())), "seconds": seconds}
    for ours, eager in zip(found, _results(layer, x, edge_index), strict=True):
        error = float((ours - eager).abs().max() / eager.abs().max())
        if not error < 1e-4:  # a NaN is wrong too
            return {"ok": False, "message": f"wrong numbers: relative error {error:.1e}", "seconds": seconds}
    return {"ok": True, "message": "", "seconds": seconds}


def _results(layer: Any, x: Any, edge_index: Any) -> tuple[Any, Any]:
    """Runs a layer forward and backward; returns the output and the gradient of the features."""
    x = x.clone().requires_grad_()
    out = layer(x, edge_index)
    out.square().sum().backward()
    return out.detach(), x.grad


def main() -> None:
    """Runs the trial that the command line names."""
    try:
        found = probe(*sys.argv[1:3])
    except Exception as error:
        if len(sys.argv) > 3:  # --traceback: a person wants the whole traceback
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        found = {"ok": False, "message": f"{type(error).__name__}: {' '.join(lines[:4])[:400]}", "seconds": None}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
