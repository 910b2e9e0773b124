"""Prepares optimizers for steps that are captured in CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Makes an optimizer keep its changing state on the GPU of its parameters: learning rates, step counts.

    If the user has not chosen an implementation, the optimizer uses fused kernels where they exist. An optimizer that
    is neither fused nor capturable stays unchanged.
    """
    for group in optimizer.param_groups:
        fused = type(optimizer) in _FUSED and _fuse(group, optimizer)
        if not fused and "capturable" not in group:
            continue
        if "capturable" in group:
            group["capturable"] = True
        double = any(p.dtype == torch.float64 for p in group["params"])
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64 if double else torch.float32, device=device)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            state.update({k: v.to(device) for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 0})
    # Steps outside of a recording are intended, so torch need not warn of them.
    optimizer._warned_capturable_if_run_uncaptured = True


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def _fuse(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    # Fused kernels take the learning rate in float32.
    fit = all(p.dtype != torch.float64 and (p.grad is None or not p.grad.is_sparse) for p in group["params"])
    if fit and group["fused"] is None and group["foreach"] is None and not group["differentiable"]:
        group["fused"] = True
        setattr(optimizer, "_step_supports_amp_scaling", True)  # noqa: B010  (torch does not declare it)
    return bool(group["fused"])
