"""The comparison of shards with the golden: statistics, bounds and findings."""
