"""Measuring steps, and the roofline beside them."""
