"""Generated bugs: the parallel code, rewritten at one place each by operators, in memory only. No torch."""
