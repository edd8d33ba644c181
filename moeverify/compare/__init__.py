"""What ranks compute against the golden, where it lies: statistics and hashes, merged over ranks."""
