"""Families of models, built of the parallel layers; see ``docs/adding_a_family.md``."""

if __name__ == "models":
    from megacore.parallel.short_names import share

    share("models")
