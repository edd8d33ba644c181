"""Comparison of shards with the golden on each rank: statistics and hashes, merged over ranks."""
