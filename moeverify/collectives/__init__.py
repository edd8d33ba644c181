"""Watching the collectives that ranks issue."""
