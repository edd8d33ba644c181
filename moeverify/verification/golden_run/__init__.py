"""Creation of a golden: the float64 run of one device, the noise of the precision, and the summary in git."""
