"""Encoders whose vocabulary does not fit the notes."""

from __future__ import annotations

from collections.abc import Iterator

from fednotes.core.wording import list_names
from fednotes.jobs.causes import Cause, Evidence, limit_importance
from fednotes.jobs.diagnosis.evidence import RunEvidence
from fednotes.jobs.results import Outcome
from fednotes.jobs.run_folder import read_part_outcome

# English notes have about 1.3 to 1.5 sub-words a word in encoders of English text. Two
# are usual where the encoder was trained on another language.
MANY_PIECES = 2.0
ENOUGH_WORDS = 1000  # the mean of fewer words is that of a few odd ones


def find_vocabulary_causes(run: RunEvidence) -> Iterator[Cause]:
    """Yield a cause if an encoder splits the words of sites into many sub-words."""
    outcome = read_part_outcome(run.folder / "federated" / "done.json", Outcome)
    if outcome is None:
        return
    pieces = {
        site: counts["pieces"] / counts["words"]
        for site, counts in outcome.reading.items()
        if counts.get("words") and "pieces" in counts
    }
    many = {site: number for site, number in pieces.items() if number >= MANY_PIECES}
    if not many:
        return
    words = sum(int(outcome.reading[site]["words"]) for site in many)
    yield Cause(
        "words_split",
        limit_importance("medium", words, ENOUGH_WORDS),
        list_names(list(many)),
        "the encoder splits words into many sub-words, so it was not made for this "
        "language or this kind of text",
        "set encoder in [model] to one for the notes' language, or train one on such "
        "notes with the method pretrain",
        evidence=tuple(
            Evidence(
                f"{site}: {number:.1f} sub-words a word",
                "federated/done.json",
                {"pieces_per_word": number},
            )
            for site, number in many.items()
        ),
    )
