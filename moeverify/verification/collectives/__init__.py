"""Recording of the collectives that ranks issue."""
