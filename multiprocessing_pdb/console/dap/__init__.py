"""Adapter between stopped ranks and editors that use the Debug Adapter Protocol."""
