"""gnncompile: a compiler for graph neural networks written with PyTorch Geometric."""

from gnncompile.batches.loader import Loader, loader
from gnncompile.capture.compiled import compile
from gnncompile.capture.warmup import warmup
from gnncompile.report.explain import Report, explain
from gnncompile.steps.train_step import TrainStep

__version__ = "0.1.0"
__all__ = ["Loader", "Report", "TrainStep", "__version__", "compile", "explain", "loader", "warmup"]
