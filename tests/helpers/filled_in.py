"""The fields of methods' settings that a job fills in, so that no job file sets them."""

FILLED_IN = frozenset(
    {
        "min_sites",
        "model",
        "phenotypes",
        "platforms",
        "privacy",
        "questionable",
        "seed",
        "shared_tags",
        "sites",
        "space",
        "tags",
        "vectors",
    }
)
