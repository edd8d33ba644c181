"""One file a format of the results."""
