"""One file a fault, named after its number in the catalogue of real bugs; each holds one `FAULT`."""
