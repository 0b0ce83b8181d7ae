"""Integers about weights: schemas, layouts, who holds which elements, and the plan of a transfer."""
