"""The errors that gnncompile raises, one class for each thing that goes wrong.

All of them are :class:`GnncompileError`, and each is also the built-in exception that Python or torch would raise for
the like, so ``except ValueError`` keeps working. A message names the argument, what was found, what was expected, and
what to do.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CaptureError",
    "DerivativeError",
    "GnncompileError",
    "HostMemoryError",
    "IndexOutOfRangeError",
    "InternalError",
    "InvalidRegionError",
    "KernelMemoryError",
    "LazyParameterError",
    "MissingLibraryError",
    "PartitionError",
    "ReplicaError",
    "SecondBackwardError",
    "SecondDerivativeError",
    "StructureSizeError",
    "UnsupportedRegion",
    "UnsupportedSampling",
    "UsageError",
]


class GnncompileError(Exception):
    """The base of all errors of gnncompile."""


class ArgumentError(GnncompileError, ValueError):
    """An argument, an option or an input has a value that can't be used."""


class ArgumentTypeError(GnncompileError, TypeError):
    """An argument, an option or an input is of a type or a dtype that can't be used."""


class IndexOutOfRangeError(GnncompileError, IndexError):
    """An index (of ``edge_index``, ``batch``, an edge type, a selection) is outside of what it numbers.

    On a GPU the check does not wait for the device, so this error may be raised at a later call.
    """


class MissingLibraryError(GnncompileError, ImportError):
    """An optional library is needed and not installed."""


class CaptureError(GnncompileError, RuntimeError):
    """A model can't be captured in the way that was asked for: ``fullgraph=True``, or ``torch.compile``'s backend."""


class DerivativeError(GnncompileError, RuntimeError):
    """Compiled code was differentiated in a way that it has no code for: forward mode, or a batch of gradients."""


class SecondDerivativeError(DerivativeError):
    """A compiled backward was asked for the gradient of a gradient."""


class SecondBackwardError(DerivativeError):
    """A recorded forward was differentiated a second time, after the first time had overwritten what it needs."""


class StructureSizeError(GnncompileError, RuntimeError):
    """Two sizes that only the data knows were equal when the model was captured, and are not in this call."""


class LazyParameterError(GnncompileError, RuntimeError):
    """The model has parameters without a shape, which the first call is to give them."""


class ReplicaError(GnncompileError, RuntimeError):
    """A step of ``DistributedDataParallel`` has gradients that can't be averaged."""


class PartitionError(GnncompileError, RuntimeError):
    """A model can't run over the parts of a graph as over the whole graph, or an exchange of rows has failed."""


class KernelMemoryError(GnncompileError, MemoryError):
    """A kernel for the CPU found no memory for what it stores in between."""


class HostMemoryError(GnncompileError, MemoryError):
    """The host has not enough memory that can be pinned, so that a GPU can read it."""


class InternalError(GnncompileError, RuntimeError):
    """Something that can't happen has happened: please report it."""


class InvalidRegionError(GnncompileError, ValueError):
    """A region is not well formed, or has no gradient."""


class UnsupportedRegion(GnncompileError):  # noqa: N818  (named after what it says of a region)
    """A generator can't express a region. It never reaches the user: the reference interpreter runs the region."""


class UnsupportedSampling(GnncompileError):  # noqa: N818  (named as the class above)
    """A device has no sampler for what was asked for. It never reaches the user: the CPU samples."""


class UsageError(GnncompileError):
    """A command line that argparse accepts and that can't be run; the exit status is 2."""
