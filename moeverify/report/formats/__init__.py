"""File formats of results, one module each."""
