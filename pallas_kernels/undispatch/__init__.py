"""Sum of the rows that a token sent to its experts: the transpose of dispatch."""

from pallas_kernels.undispatch.api import undispatch

__all__ = ["undispatch"]
