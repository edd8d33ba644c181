"""Verification of distributed Mixture-of-Experts training against a single device."""
