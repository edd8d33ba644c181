"""The reference transformer in plain torch, without any parallel code."""
