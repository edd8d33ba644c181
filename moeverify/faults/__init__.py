"""The benchmark of real bugs: each a file that breaks the parallel code as the bug did, never the comparison."""
