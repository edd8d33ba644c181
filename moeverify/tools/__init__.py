"""Tools beside verification: placement of experts, conversion of weights, benchmarks."""
