"""gnncompile: a compiler for graph neural networks written with PyTorch Geometric."""

from gnncompile.capture.compiled import compile

__version__ = "0.1.0"
__all__ = ["__version__", "compile"]
