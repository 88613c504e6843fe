"""Numbers that a user gives, as Python's own: so that settings can be compared, hashed, written to a file and compiled with."""

import operator

import numpy as np

__all__ = ["integer", "real"]


def integer(name: str, value) -> int:
    """A Python int. No bool and no float, even a whole one: both come from mistakes.

    Raises:
      ValueError: anything but one integer, Python's, numpy's or JAX's.
    """
    try:
        if np.asarray(value).dtype.kind == "b":
            raise TypeError
        return operator.index(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} must be an integer") from None


def real(name: str, value) -> float:
    """A Python float. No bool and no text.

    Raises:
      ValueError: anything but one real number, Python's, numpy's or JAX's.
    """
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "iuf":
        raise ValueError(f"{name}={value!r} must be a number")
    return float(value)
