"""Launch scripts and recipes, which come along with an installation, and the job of a Ray cluster."""
