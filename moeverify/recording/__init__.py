"""Making a golden: the float64 run of one device, the noise of its precision, and what stands for it in git."""
