"""The benchmark of real bugs: each a small file that breaks the parallel code as the bug did, never the comparison."""
