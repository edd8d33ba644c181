"""Probes of torch and of collectives on this machine."""
