"""Right values in a wrong layout: search for the wrong reshape, transpose or chunk order."""
