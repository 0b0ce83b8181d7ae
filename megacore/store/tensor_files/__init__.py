"""Tensors in safetensors files: read, written, streamed, accounted for and published."""
