"""One folder of weights made of another: formats, layouts, adapters, experts of a dense model."""
