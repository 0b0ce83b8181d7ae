"""Folders of weights, ours and Hugging Face's: opened, audited, compared and loaded."""
