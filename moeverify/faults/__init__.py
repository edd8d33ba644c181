"""Benchmark of real bugs, one file per class. Each breaks the parallel code like the bug, never the comparison."""
