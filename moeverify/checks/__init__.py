"""The checks, a file each: what ranks compute against the golden, against themselves and against their layout."""
