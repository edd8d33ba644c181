"""Guarding of a single run of a training script: errors that show without another run to compare with."""
