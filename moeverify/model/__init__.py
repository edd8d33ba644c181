"""The reference transformer: plain torch that knows no parallelism."""
