"""The training loop and what a rank does around it: start, step, progress, saving."""
