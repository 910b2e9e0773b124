"""Compiles Triton kernels in threads, before their first launch. Imports Triton.

Most of Triton's compiler runs without Python's lock. So several kernels are compiled at once, while Inductor writes the
code around them. A kernel is compiled for pointers that are multiples of 16, as torch allocates them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
import triton

from gnncompile import _compat
from gnncompile.device import available_cores

logger = logging.getLogger(__name__)

MOST_THREADS = 8
"""Most threads. The part of Triton that is written in Python takes about a sixth of a compile, and runs in one thread
at a time."""


def begin(
    kernel: Any, pointers: Sequence[torch.dtype], others: Sequence[Any], options: Mapping[str, Any]
) -> Future[None] | None:
    """Starts to compile a kernel for the current GPU. Triton itself keeps the result, for the launch that needs it.

    Args:
        kernel: A function decorated with ``triton.jit``.
        pointers: The dtypes of the tensors, which are the first parameters.
        others: The arguments after the tensors, as in a launch. A number that Triton does not specialise may be any
            int32.
        options: The compile options.

    Returns:
        The future of the compile, which has no error: a launch after a failed compile compiles again, and raises the
        error. None if nothing is compiled: without a GPU, and under Triton's interpreter.
    """
    if not isinstance(kernel, triton.JITFunction) or not torch.cuda.is_initialized():
        return None
    return _threads().submit(_compile, kernel, (*pointers, *others), _compat.current_device(), dict(options))


def _compile(kernel: Any, arguments: tuple[Any, ...], device: int, options: dict[str, Any]) -> None:
    try:
        with torch.cuda.device(device):
            _compat.prepare_triton()
            kernel.warmup(*arguments, grid=(1, 1, 1), **options)
    except Exception:
        logger.debug("a kernel could not be compiled ahead of its launch", exc_info=True)


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, available_cores()), "gnncompile-triton")


if hasattr(os, "register_at_fork"):  # a forked process does not have the threads
    os.register_at_fork(after_in_child=_threads.cache_clear)
