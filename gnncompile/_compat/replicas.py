"""Features of ``DistributedDataParallel`` and ``fully_shard`` that compiled code must know of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def extras_of_replica(replica: DistributedDataParallel) -> list[str]:
    """Returns the names of a ``DistributedDataParallel``'s features besides averaging gradients and sending buffers."""
    found = {
        "register_comm_hook()": getattr(replica, "_comm_hooks", None),
        "a hook for buffers": hasattr(replica, "buffer_hook"),
        "mixed_precision": getattr(replica, "mixed_precision", None),
        "delay_all_reduce_named_params": getattr(replica, "_delay_all_reduce_params", None),
        "compiled autograd's reducer": getattr(replica, "_use_python_reducer", False),
        "register_post_accumulate_grad_hook()": any(
            getattr(p, "_post_accumulate_grad_hooks", None) for p in replica.parameters()
        ),
        "join()": replica._join_config.enable,
        "no_sync()": not replica.require_backward_grad_sync,
    }
    return [name for name, there in found.items() if there]


def are_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether the memory of parameters is freed between forward and backward, as ``fully_shard`` (FSDP) does."""
    return any(getattr(part, "_is_fsdp_managed_module", False) for module in modules for part in module.modules())
