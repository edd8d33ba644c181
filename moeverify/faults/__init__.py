"""Benchmark of real bugs, one per file. Each breaks the parallel code like the bug, never the comparison."""
