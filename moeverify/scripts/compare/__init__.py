"""Comparison of two recorded runs of a training script: required equalities, then the first difference."""
