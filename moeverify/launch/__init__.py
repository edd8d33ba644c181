"""Ranks: torch elastic on one node, torchrun or Slurm on many; crashes and hangs become reports."""
