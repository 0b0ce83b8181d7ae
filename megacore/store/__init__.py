"""Checkpoints and Hugging Face folders, in rooms of their own: bytes, tensors, folders, conversions."""
