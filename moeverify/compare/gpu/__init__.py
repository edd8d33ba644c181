"""Comparing on a GPU while training goes on."""
