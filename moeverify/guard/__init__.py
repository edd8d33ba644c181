"""Guarding a training script in one run: what is wrong without any other run to compare with."""
