"""Launch scripts and recipes, which come along with an installation."""
