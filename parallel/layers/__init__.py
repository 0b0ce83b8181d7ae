"""Layers that ranks share out: linears, norms, embedding, head and loss, attention over a context, experts."""
