"""Scripts with absl flags: train, sample, evaluate, diagnose, benchmark, convert, tables."""
