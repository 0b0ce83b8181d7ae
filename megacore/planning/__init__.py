"""What a run needs of memory, network and time, and what faults leave of it, before it starts."""
