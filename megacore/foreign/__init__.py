"""Configs of other projects: what each of their keys becomes in a recipe, as tables."""
