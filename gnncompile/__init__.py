"""gnncompile: a compiler for graph neural networks written with PyTorch Geometric."""

from typing import Any

__version__ = "0.1.0"
__all__ = [
    "CacheInfo",
    "Loader",
    "Part",
    "Partition",
    "Report",
    "TrainStep",
    "__version__",
    "cache_info",
    "clear_cache",
    "compile",
    "explain",
    "load_part",
    "loader",
    "mean_over_parts",
    "package",
    "package_info",
    "partition",
    "release_memory",
    "warmup",
]

import_error: Exception | None = None
"""Why gnncompile is of no use here (a torch or PyG that is missing or too old); None if it is."""

try:
    from gnncompile.batches.loader import Loader, loader
    from gnncompile.capture.compile import compile
    from gnncompile.capture.warmup import warmup
    from gnncompile.layout.identity_cache import CacheInfo, cache_info, clear_cache
    from gnncompile.partitioning.losses import mean_over_parts
    from gnncompile.partitioning.part import Part, load_part
    from gnncompile.partitioning.partition import Partition, partition
    from gnncompile.report.explain import Report, explain
    from gnncompile.runtime.kept_memory import release_memory
    from gnncompile.serving.package import package, package_info
    from gnncompile.steps.train_step import TrainStep
except (ImportError, AttributeError) as error:
    # Raised when something is asked for, not here: `python -m gnncompile doctor` must be able to say what to do.
    import_error = error

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise ImportError(f"gnncompile.{name}: {import_error}; run `python -m gnncompile doctor`") from import_error
        raise AttributeError(f"module 'gnncompile' has no attribute {name!r}")
