"""What is kept for the backward, and where: recomputation, offload of activations."""
