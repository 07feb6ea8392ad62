"""The fields of methods' settings that a job fills in, so that no job file sets them."""

FILLED_IN = frozenset(
    {
        "min_sites",
        "model",
        "site_configs",
        "phenotypes",
        "platforms",
        "privacy",
        "public_words",
        "questionable",
        "seed",
        "shared_tags",
        "shared_types",
        "sites",
        "space",
        "tags",
        "vectors",
    }
)
