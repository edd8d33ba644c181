"""Checks of a case, one per file: against the golden, against recomputation, or against the layout."""
