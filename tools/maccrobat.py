"""Make the table of a job's site with a part of MACCROBAT and three entity types."""

SITE = """
[sites.{site}]
path = "$FEDNOTES_CORPORA/maccrobat"
share = "{share}"
split = "document"
{split}types = [{types}]
label_map = {{ Disease_disorder = "problem", Sign_symptom = "problem", \
Diagnostic_procedure = "test", Medication = "treatment", Therapeutic_procedure = "treatment" }}
"""
TYPES = ("problem", "test", "treatment")


def site_of(site: str, share: str, split: str, types: tuple[str, ...] = TYPES) -> str:
    """Return the table [sites.NAME] of a job file.

    Args:
        site: The site's name.
        share: The site's part of the corpus, such as "2/5".
        split: Further lines, which say how notes are divided into train, valid and test.
        types: The site's entity types.
    """
    named = ", ".join(f'"{name}"' for name in types)
    return SITE.format(site=site, share=share, split=split, types=named)
