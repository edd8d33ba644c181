"""Mesh axes, rank coordinates, and which part of a logical tensor a rank holds."""
