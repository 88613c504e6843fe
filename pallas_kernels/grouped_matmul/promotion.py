"""The promotion interval of fp8 sums: one number for every kernel, since it is part of the bits.

Hopper's fp8 tensor cores add with a short accumulator (about 14 bits). After every PROMOTION products of a row, counted from the
row's first, the sum so far goes into a float32 accumulator and the short one starts at zero again.
"""

PROMOTION = 128
