"""The end of process groups, which torch has no hook for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def patch_destroy_process_group(before: Callable[[dist.ProcessGroup | None], None]) -> None:
    """Makes ``torch.distributed.destroy_process_group`` call `before` first.

    Args:
        before: Called with the group that ends, or with None if all groups end.
    """
    destroy = dist.distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        try:
            before(None if group is dist.group.WORLD else group)
        finally:
            destroy(group)

    dist.distributed_c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group


def is_nccl(group: dist.ProcessGroup) -> bool:
    """Whether a process group communicates between GPUs by NCCL."""
    return "cuda:nccl" in dist.get_backend_config(group).split(",")


def has_usual_priority(group: dist.ProcessGroup) -> bool:
    """Whether a process group uses NCCL, on a stream without priority over the kernels of the model."""
    asked = os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "").lower() in ("1", "t", "true", "y", "yes")
    if asked or not is_nccl(group):
        return False
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    return not getattr(options, "is_high_priority_stream", False)
