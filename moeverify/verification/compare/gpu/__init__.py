"""Comparison on a GPU while training continues."""
