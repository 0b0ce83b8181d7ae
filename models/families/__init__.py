"""One file for each family: its config, its table of weights and its anatomy."""
