"""What several GPU tests compare, and how."""

import numpy as np

# 257 rows in 8 groups: aligned and not, empty, few rows each, one group of nearly all; rows behind the last group.
GROUP_SIZES = {
    "equal": [32] * 8,
    "empty": [0, 100, 0, 0, 29, 128, 0, 0],
    "decode": [4, 0, 7, 1, 0, 16, 17, 3],
    "single": [0, 0, 0, 256, 0, 0, 0, 0],
    "hot": [1, 2, 240, 3, 4, 1, 1, 4],
    "tail": [16, 0, 17, 1, 64, 0, 0, 5],
    "none": [0] * 8,
}


def same(a, b) -> bool:
    """Whether shape, type and bits are equal."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_same(a, b) -> None:
    """The same type and the same bits: NaN equals itself, -0 is not 0."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(f"u{a.dtype.itemsize}"), b.view(f"u{b.dtype.itemsize}"))
