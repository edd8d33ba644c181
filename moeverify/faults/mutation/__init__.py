"""Bugs made by machine: the parallel code, rewritten by operators at one place each, in memory only. No torch."""
