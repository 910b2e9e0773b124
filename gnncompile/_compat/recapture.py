"""What the code that captures a model raises if the model must be captured in another way."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final


class Setting(Enum):
    """A setting of captures that may have to change. Each has its own kind of value."""

    SIZES = "sizes of inputs"
    """The sizes that travel with integer inputs. The value is a pair: the input's source, and whether the length of its
    longest segment travels with it, besides the number of its segments."""

    PADDING = "padding"
    """Whether padded mini-batches are captured with their padding. The value is False."""

    ROWS = "numbers of rows"
    """The numbers of valid rows with which a padded mini-batch is captured with its padding. The value is one more
    :class:`gnncompile.layout.batch_metadata.RowLimit`."""

    SELF_LOOPS = "self loops"
    """How removed self loops are traced. The value is "exact" (they are taken out, so sizes depend on the data), or
    "off" (all PyG code is traced as written)."""

    EMPTY_SIZES = "empty sizes"
    """Whether sizes of 0 and 1 get captures of their own. The value is True."""

    MADE_MATRICES = "made matrices"
    """Whether sparse matrices that the model makes are captured. The value is False."""

    SPLIT_EDGE_LISTS = "split edge lists"
    """Whether the two rows of an edge list enter as tensors of their own. The value is False."""

    GRADIENTS = "gradients"
    """Whether ``torch.autograd.grad`` in the model is part of the graph. The value is False: the graph breaks there."""

    WATCHED_LAYERS = "watched layers"
    """The layers whose hooks are checked before each call. The value is one more layer."""

    UNCOMPILED_INPUTS = "uncompiled inputs"
    """The inputs with which calls run uncompiled. The value is their class or layout."""


class Recapture(BaseException):
    """A capture must begin again with another setting. No part of the captured code has run.

    Not an Exception: Dynamo must neither wrap it nor turn it into a graph break.

    Args:
        setting: The setting that must change.
        value: The value that it must have; see :class:`Setting`.
        reason: Why, as one line.
        what: The part of the model that ``explain`` names if the setting changes. If it is empty, ``explain`` does not
            mention the change.
        line: The user's line, as ``file:line: code``; "?" if it is unknown.
    """

    def __init__(self, setting: Setting, value: Any, reason: str, what: str = "", line: str = "?") -> None:
        super().__init__(reason)
        self.setting: Final = setting
        self.value: Final = value
        self.reason: Final = reason
        self.what: Final = what
        self.line: Final = line
