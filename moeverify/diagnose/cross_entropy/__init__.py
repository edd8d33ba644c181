"""The loss of each token by its formula, and the search for the variant of it that ranks have computed."""
