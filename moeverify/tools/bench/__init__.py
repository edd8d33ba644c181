"""Measurements of training steps, and roofline measurements for comparison."""
