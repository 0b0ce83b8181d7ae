"""What can be wrong with a config and a machine, asked before anything starts."""
