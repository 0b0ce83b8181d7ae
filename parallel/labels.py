"""What data and loss agree on."""

IGNORE = -100
"""The label of a token that is not counted, as everywhere in the field."""
