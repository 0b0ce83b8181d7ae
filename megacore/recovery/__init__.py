"""Runs that outlive faults: what befalls the ranks of a run, and how the others go on."""
