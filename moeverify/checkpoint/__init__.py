"""Checkpoints, and weights in other people's formats."""
