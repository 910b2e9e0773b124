"""How the error of a row is told in one line."""


def first_line(error: BaseException) -> str:
    """Returns the type of an error and its first line that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
