"""Placements: which region of a logical tensor a rank has."""
