"""Piece against golden: difference, bound, finding."""
