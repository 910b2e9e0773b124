"""Errors of torch, Triton and CUDA that have no class of their own: by a code, or by their text where there is no code.

No other file matches the text of an error. A release that changes a text costs what the function says.
"""

from __future__ import annotations

import re

_INVALIDATED = 901
"""``cudaErrorStreamCaptureInvalidated``, and ``CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`` of the driver."""


def is_broken_capture(error: BaseException) -> bool:
    """Whether CUDA raised an error because an earlier error, or other work in the process, had broken a capture.

    Torch's own calls of CUDA's runtime raise ``torch.AcceleratorError`` with CUDA's code. Triton's launcher and torch's
    calls of the driver raise a plain RuntimeError with CUDA's text. With another text, a launch in a broken capture
    would be taken for what broke the capture, which would not be tried again.
    """
    code = getattr(error, "error_code", None)
    if code is not None:
        return bool(code == _INVALIDATED)
    return isinstance(error, RuntimeError) and "previous error during capture" in str(error)


def broken_bounds(error: RuntimeError) -> str | None:
    """Returns the bounds that an index violates, if Inductor's CPU code raised this error; None for other errors.

    The generated C++ code raises a plain RuntimeError. With another text, the user gets that error.
    """
    found = re.search(r"index out of bounds: (.*)", str(error))
    return None if found is None else found[1].strip()
