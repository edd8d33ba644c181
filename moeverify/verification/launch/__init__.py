"""Process launching: torch elastic on one node, torchrun or Slurm on several, with failure reports."""
