"""Gradients: accumulated in buckets, and summed over the ranks that hold the same elements."""
