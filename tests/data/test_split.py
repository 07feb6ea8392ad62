"""Splits lose nothing and leak nothing; synthetic sites are seeded and aligned."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, Span
from fednotes.data.checks import check_sites
from fednotes.data.formats import read
from fednotes.data.split import (
    make_sentence_documents,
    mask_overlap,
    remove_leaks,
    split_documents,
    subsample,
)
from fednotes.data.stats import find_overlapping_forms, normalise_span
from fednotes.data.synthetic import (
    GENRE_TYPES,
    PARTS,
    TYPES,
    SyntheticSite,
    _compile_template,
    generate,
    write_sites,
)
from fednotes.data.tags import encode_tags
from fednotes.data.text import split_sentences, tokenize

THREE = {"train": 0.8, "valid": 0.1, "test": 0.1}


def document(
    name: str, *sentences: str, patient: str | None = None, ward: str = "a"
) -> Document:
    """Return a document with a sentence per line, and an "X" mention on each
    `drug…`."""
    text = "\n".join(sentences)
    bounds, at = [], 0
    for sentence in sentences:
        bounds.append((at, at + len(sentence)))
        at += len(sentence) + 1
    spans, at = [], 0
    for word in text.replace("\n", " ").split(" "):
        if word.startswith("drug"):
            spans.append(Span(at, at + len(word), "X"))
        at += len(word) + 1
    return Document(
        name, text, tuple(spans), patient, (), {"ward": ward}, tuple(bounds)
    )


def components(units: list[set[str]]) -> list[set[int]]:
    """Return connected components by breadth-first search, without union-find."""
    unassigned, groups = set(range(len(units))), []
    while unassigned:
        queue, group = [unassigned.pop()], set()
        while queue:
            i = queue.pop()
            group.add(i)
            near = {j for j in unassigned if units[i] & units[j]}
            unassigned -= near
            queue += near
        groups.append(group)
    return groups


# A small inventory of sentences, so that repeats are common.
LONG = [f"this is sentence number {n} ." for n in range(30)]
SHORT = ["she went home .", "No .", "OK"]
SENTENCES = st.lists(st.sampled_from(LONG + SHORT), min_size=1, max_size=4)
CORPORA = st.lists(SENTENCES, min_size=8, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    CORPORA,
    st.integers(0, 5),
    st.sampled_from(["sentence", "document", "patient", "ward"]),
)
def test_identical_sentences_are_in_one_part(
    corpus: list[list[str]], seed: int, by: str
) -> None:
    """Groups found by breadth-first search stay whole, for every unit; nothing is lost."""
    documents = [
        document(f"d{i}", *sentences, patient=f"p{i // 2}", ward=f"w{i // 3}")
        for i, sentences in enumerate(
            [s.upper() if i % 3 == 0 else s for s in sentences]
            for i, sentences in enumerate(corpus)
        )
    ]
    items = list(make_sentence_documents(documents)) if by == "sentence" else documents
    limit = 1 if by == "sentence" else 5
    units = []
    for item in items:
        keys = {s.lower() for s in item.text.split("\n") if len(s.split()) >= limit}
        group_keys = {"patient": item.patient, "ward": item.meta["ward"]}.get(
            by, item.id
        )
        units.append(keys | {f"unit {group_keys}"})
    groups = components(units)
    if len(groups) < 3:
        with pytest.raises(DataError, match=r"only \d+ group"):
            split_documents(documents, THREE, by, seed)
        return
    parts = split_documents(documents, THREE, by, seed)
    part_of = {d.id: name for name, docs in parts.items() for d in docs}
    assert Counter(d.id for docs in parts.values() for d in docs) == Counter(
        d.id for d in items
    )
    for group in groups:
        assert len({part_of[items[i].id] for i in group}) == 1
    assert all(parts.values())


def test_parts_have_the_requested_sizes() -> None:
    """Distinct sentences split to the sentence; long and short notes reach every part."""
    singles = [
        document(f"d{i}", f"sentence {i} is not like the others") for i in range(1000)
    ]
    parts = split_documents(singles, THREE, "sentence", 3)
    assert {k: len(v) for k, v in parts.items()} == {
        "train": 800,
        "valid": 100,
        "test": 100,
    }
    notes = [
        document(
            f"n{i}", *(f"note {i} sentence {j} of it" for j in range(1 + i * i % 17))
        )
        for i in range(200)
    ]
    total = sum(len(n.sentences) for n in notes)
    for seed in range(5):
        sizes = {
            k: [len(d.sentences) for d in v]
            for k, v in split_documents(
                notes, {"train": 0.7, "test": 0.3}, "document", seed
            ).items()
        }
        assert abs(sum(sizes["train"]) / total - 0.7) < 0.02
        means = {k: sum(v) / len(v) for k, v in sizes.items()}
        assert abs(means["train"] - means["test"]) < 2.0


def test_no_part_is_empty_and_the_seed_decides() -> None:
    """Four tenths of a note are still a note, if there is one to spare."""
    notes = [document(f"n{i}", f"note number {i} is short .") for i in range(50)]
    sizes = {
        k: len(v) for k, v in split_documents(notes[:5], THREE, "document").items()
    }
    assert sizes == {"train": 3, "valid": 1, "test": 1}
    assert split_documents(notes, THREE, "document", 1) == split_documents(
        notes, THREE, "document", 1
    )
    assert split_documents(notes, THREE, "document", 1) != split_documents(
        notes, THREE, "document", 2
    )


def test_short_sentences_join_sentences_but_not_documents() -> None:
    """The "OK" in every note joins no notes, but all its copies are in one part by
    sentence."""
    notes = [document(f"n{i}", "OK", f"note number {i} is short .") for i in range(20)]
    assert len(split_documents(notes, THREE, "document")["train"]) == 16
    parts = split_documents(notes, THREE, "sentence")
    assert sorted(sum(d.text == "OK" for d in docs) for docs in parts.values()) == [
        0,
        0,
        20,
    ]
    with pytest.raises(DataError, match="only 1 group"):
        split_documents(notes, THREE, "document", min_words=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"train": 0.8, "test": 0.1},), "must sum to 1"),
        (({},), "must sum to 1"),
        ((THREE, "patient"), "10 of 10 documents have no value"),
        ((THREE, "age"), "cannot split by age"),
        (
            ({"train": 0.5, **{f"p{i}": 0.05 for i in range(10)}}, "document"),
            "only 10 group",
        ),
    ],
)
def test_impossible_splits_are_refused(
    arguments: tuple[Any, ...], message: str
) -> None:
    notes = [document(f"n{i}", f"note number {i} is short .") for i in range(10)]
    with pytest.raises((ConfigError, DataError), match=message):
        split_documents(notes, *arguments)
    assert split_documents(notes, {"train": 1.0, "test": 0.0})["test"] == ()


def test_sentence_documents_keep_spans_and_tokens() -> None:
    """Offsets by hand: "b drug1" starts at 4; a discontinuous mention moves piece by
    piece."""
    text = "a c\nb drug1 of x drug2"
    spans = (Span(6, 11, "X"), Span(6, 22, "Y", ((6, 11), (17, 22))))
    bounds, tokens = ((0, 3), (4, 22)), ((0, 1), (2, 3), (4, 5), (6, 11))
    meta = {"ward": 1, "raw": ("lines",)}
    note = Document("d", text, spans, "p", ("1",), meta, bounds, tokens)
    first, second = make_sentence_documents([note])
    assert (first.text, first.spans, first.tokens) == ("a c", (), ((0, 1), (2, 3)))
    assert second.text == "b drug1 of x drug2"
    assert second.spans == (Span(2, 7, "X"), Span(2, 18, "Y", ((2, 7), (13, 18))))
    assert second.tokens == ((0, 1), (2, 7))
    assert (second.id, second.patient, second.codes) == ("d#1", "p", ("1",))
    assert second.meta == {"document": "d", "ward": 1}


@given(st.text("ab .\n", min_size=1, max_size=30), st.data())
def test_no_span_is_lost_or_changed(text: str, data: st.DataObject) -> None:
    """Spans over any visible text, white space at their edges and over line ends as
    well."""
    edges = st.integers(0, len(text))
    pairs = data.draw(st.lists(st.tuples(edges, edges), max_size=4))
    spans = {Span(a, b, "X") for a, b in pairs if text[a:b].strip()}
    pieces = make_sentence_documents([Document("d", text, tuple(spans))])
    mention_texts = [p.text[s.start : s.end] for p in pieces for s in p.spans]
    assert sorted(mention_texts) == sorted(text[s.start : s.end] for s in spans)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(0, 9), st.floats(0.01, 1), st.floats(0.01, 1))
def test_subsamples_are_nested(
    count: int, seed: int, first: float, second: float
) -> None:
    notes = [document(f"n{i}", f"note {i}") for i in range(count)]
    small, large = (subsample(notes, f, seed) for f in sorted((first, second)))
    assert set(map(id, small)) <= set(map(id, large))
    assert len(small) == max(1, round(min(first, second) * count))
    assert [n.id for n in large] == [n.id for n in notes if n in large]
    assert subsample([], first) == ()


def test_training_sentences_that_occur_in_the_test_part_are_dropped() -> None:
    train = [
        document("a", "I took drug1 .", "It helped ."),
        document("b", "All new here ."),
    ]
    test = [document("c", "it  HELPED ."), document("d", "no .")]
    remaining, dropped = remove_leaks(train, test)
    assert dropped == 1
    assert [d.text for d in remaining] == ["I took drug1 .", "All new here ."]
    assert remaining[0].spans == (Span(7, 12, "X"),)
    assert remaining[1] is train[1]


def test_masking_hides_shared_forms_and_drops_mentions_inside_them() -> None:
    """drug1 is at both sites, drug2 at one; a mention around it stays, one inside goes."""
    text = "took drug1 then drug2 , Drug1 pain ."
    places = ((5, 10, "X"), (16, 21, "X"), (24, 29, "Y"), (24, 34, "Z"), (25, 28, "V"))
    spans = tuple(Span(*place) for place in places)
    masked_site = Document(
        "d", text, spans, sentences=((0, 36),), tokens=((5, 10), (11, 15))
    )
    other_site = [document("o", "drug1 here"), document("o2", "drug3 there")]
    (masked,) = mask_overlap([masked_site], [other_site], 1.0)
    assert masked.text == "took MASK then drug2 , MASK pain ."
    assert masked.spans == (Span(15, 20, "X"), Span(23, 32, "Z"))
    assert masked.sentences == ((0, 34),)
    assert masked.tokens == ((5, 9), (10, 14), (23, 27))
    assert mask_overlap([masked_site], [other_site], 0.0) == (masked_site,)


def test_masking_handles_a_mention_across_two_source_sentences() -> None:
    """The sentence bounds of the file run through "drug one": both move behind its
    MASK."""
    text = "a drug one b"
    spans = (Span(2, 10, "X"),)
    cut = Document("d", text, spans, sentences=((0, 6), (7, 12)))
    (masked,) = mask_overlap(
        [cut], [[Document("e", "drug one", (Span(0, 8, "X"),))]], 1.0
    )
    assert masked.text == "a MASK b"
    assert masked.sentences == ((0, 6), (6, 8))


WORDS = st.lists(
    st.sampled_from([f"drug{i}" for i in range(9)] + ["a", "bee"]), max_size=8
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(WORDS, max_size=4), min_size=2, max_size=3),
    st.integers(0, 3),
    st.floats(0, 1),
)
def test_masking_equals_replacing_words(
    sites: list[list[list[str]]], seed: int, ratio: float
) -> None:
    """Independent program: replace words; the picked ones are told from the first
    site's results, must number round(ratio · forms), and be the same at all sites."""
    documents = [
        [document(f"{s}-{i}", " ".join(words)) for i, words in enumerate(site)]
        for s, site in enumerate(sites)
    ]
    site_counts = Counter(
        w for site in sites for w in {w for ws in site for w in ws if w[0] == "d"}
    )
    forms = {w for w, n in site_counts.items() if n > 1}
    assert find_overlapping_forms(documents) == forms
    results = [
        mask_overlap(site, documents[:i] + documents[i + 1 :], ratio, seed)
        for i, site in enumerate(documents)
    ]
    masked_words = {
        w
        for site, masked_documents in zip(sites, results, strict=True)
        for words, d in zip(site, masked_documents, strict=True)
        for w, masked in zip(words, d.text.split(), strict=True)
        if masked == "MASK"
    }
    assert masked_words <= forms
    assert len(masked_words) == round(ratio * len(forms))
    for site, masked_documents in zip(sites, results, strict=True):
        for words, result in zip(site, masked_documents, strict=True):
            expected = " ".join("MASK" if w in masked_words else w for w in words)
            assert result.text == expected
            labelled = [normalise_span(result.text, s) for s in result.spans]
            assert labelled == [
                w for w in words if w[0] == "d" and w not in masked_words
            ]


@pytest.mark.corpora
def test_real_corpora_split_without_leaks(corpora: Path) -> None:
    """PsyTAR by sentence: no normalised sentence in two parts, sizes within 1 %."""
    documents = read(corpora / "psytar" / "train.txt", "conll")
    parts = split_documents(documents, {"train": 0.8, "test": 0.2}, "sentence", 1)
    texts = {
        k: {" ".join(d.text.casefold().split()) for d in v} for k, v in parts.items()
    }
    assert not texts["train"] & texts["test"]
    total = sum(map(len, parts.values()))
    assert abs(len(parts["train"]) / total - 0.8) < 0.01


# ---- the generator: seeded, aligned, disjoint, ambiguous where it claims to be


@pytest.fixture(scope="module")
def sites() -> tuple[SyntheticSite, ...]:
    return generate(5, 200, seed=3)


def documents(site: SyntheticSite, complete: bool = True) -> list[Document]:
    data = site.complete if complete else site.data
    return [d for part in PARTS for d in getattr(data, part)]


def test_generation_depends_on_the_seed_and_not_on_the_number_of_sites(
    sites: tuple[SyntheticSite, ...],
) -> None:
    assert generate(5, 200, seed=3) == sites
    assert generate(2, 200, seed=3) == sites[:2]
    assert generate(2, 200, seed=4) != sites[:2]


def test_generated_sites_have_the_documented_sizes(
    sites: tuple[SyntheticSite, ...],
) -> None:
    """Means 200: factors 1.5, 0.9, 0.6, again from the start."""
    train = [sum(len(d.sentences) for d in s.data.train) for s in sites]
    assert train == [300, 180, 120, 300, 180]
    (generated,) = generate(1, 22)
    assert [
        sum(len(d.sentences) for d in getattr(generated.data, p)) for p in PARTS
    ] == [
        33,
        40,
        200,
    ]


def test_offsets_sentences_and_tokens_agree(sites: tuple[SyntheticSite, ...]) -> None:
    """Every mention lies in one sentence, is trimmed, and no two overlap; under the
    project's tokenizer each falls on token boundaries (encode counts)."""
    for site in sites:
        for document in [*documents(site), *documents(site, complete=False)]:
            assert split_sentences(document) == list(document.sentences)
            ends = 0
            for span in document.spans:
                form = document.text[span.start : span.end]
                assert form
                assert form == form.strip()
                assert span.start >= ends
                ends = span.end
                assert any(
                    a <= span.start < span.end <= b for a, b in document.sentences
                )
            _, alignment = encode_tags(
                document.spans, tokenize(document.text), site.complete.tags
            )
            assert alignment.exact == len(document.spans)


def test_generated_patients_and_sentences_are_in_one_part_each() -> None:
    """Over all sites, by plain dictionaries of sets."""
    generated = generate(2, 2000, seed=5)
    patient, sentence = defaultdict(set), defaultdict(set)
    notes = defaultdict(int)
    for site in generated:
        for part in PARTS:
            for d in getattr(site.data, part):
                patient[d.patient].add((site.data.id, part))
                notes[d.patient] += 1
                for a, b in d.sentences:
                    sentence[" ".join(d.text[a:b].casefold().split())].add(part)
    assert all(len(parts) == 1 for parts in patient.values())
    assert all(len(parts) == 1 for parts in sentence.values())
    assert max(notes.values()) > 1
    report = check_sites([s.data for s in generated])
    assert not [f for f in report if f.level == "error" or f.code.startswith("leak")]


def test_labels_are_noisy_only_in_training_and_limited_to_the_types_of_the_site(
    sites: tuple[SyntheticSite, ...],
) -> None:
    clean = generate(5, 200, seed=3, noise=0.0)
    for site, exact in zip(sites, clean, strict=True):
        types = site.data.tags.types
        assert site.complete.tags.types == TYPES
        for part in PARTS:
            labelled, full = getattr(site.data, part), getattr(site.complete, part)
            assert [d.text for d in labelled] == [d.text for d in full]
            cut = [tuple(s for s in d.spans if s.label in types) for d in full]
            assert [d.spans for d in getattr(exact.data, part)] == cut
            if part != "train":
                assert [d.spans for d in labelled] == cut
        gold = {(d.id, s) for d in exact.data.train for s in d.spans}
        noisy = {(d.id, s) for d in site.data.train for s in d.spans}
        assert 0.02 < len(gold - noisy) / len(gold) < 0.16  # 8 % of about 200 and more
        assert {s.label for _, s in noisy} <= set(types)


def test_generated_tag_sets_overlap_but_differ(
    sites: tuple[SyntheticSite, ...],
) -> None:
    sets = [set(s.data.tags.types) for s in sites]
    assert [tuple(sorted(t)) for t in sets[:3]] == [GENRE_TYPES[g] for g in GENRE_TYPES]
    assert all("Drug" in types for types in sets)
    assert len({frozenset(t) for t in sets[:3]}) == 3


def test_the_context_decides_the_type_and_some_test_names_are_unseen(
    sites: tuple[SyntheticSite, ...],
) -> None:
    labels = defaultdict(set)
    for site in sites:
        for d in documents(site):
            for span in d.spans:
                labels[normalise_span(d.text, span)].add(span.label)
    shared = [
        f
        for f, types in labels.items()
        if len(types & {"ADE", "Disease", "Symptom"}) > 1
    ]
    assert len(shared) > 50
    for site in sites:
        known = {normalise_span(d.text, s) for d in site.data.train for s in d.spans}
        forms = [normalise_span(d.text, s) for d in site.data.test for s in d.spans]
        unseen = sum(f not in known for f in forms) / len(forms)
        assert 0.2 < unseen < 0.8


def test_templates_compile_to_the_expected_parts() -> None:
    """Parsed by hand."""
    assert _compile_template("a [b|{Drug} [c|]]{dur}") == (
        ("text", "a "),
        (
            "choice",
            [
                (("text", "b"),),
                (
                    ("mention", "Drug"),
                    ("text", " "),
                    ("choice", [(("text", "c"),), ()]),
                ),
            ],
        ),
        ("slot", "dur"),
    )
    with pytest.raises(ValueError, match="unbalanced"):
        _compile_template("a] b")


def test_impossible_sizes_and_noise_are_refused() -> None:
    for arguments in ((0, 10), (1, 0)):
        with pytest.raises(ConfigError, match="synthetic corpora"):
            generate(*arguments)
    with pytest.raises(ConfigError, match="noise"):
        generate(1, 10, noise=1.0)


@pytest.mark.parametrize("format", ["conll", "jsonl", "brat"])
def test_written_sites_are_read_back(
    sites: tuple[SyntheticSite, ...], format: str, tmp_path: Path
) -> None:
    """The mentions are the same after writing and reading, spaces aside (CoNLL has
    none)."""
    folders = write_sites(sites[:2], tmp_path, format)
    assert [f.name for f in folders] == ["discharge", "reports"]
    for site, folder in zip(sites, folders, strict=False):
        for part in PARTS:
            name = part if format == "brat" else f"{part}.{format}"
            back = {d.id: d for d in read(folder / name)}
            part_documents = getattr(site.data, part)
            assert [_mentions(back[d.id]) for d in part_documents] == [
                _mentions(d) for d in part_documents
            ]
    with pytest.raises(ConfigError, match="cannot write 'word'"):
        write_sites(sites, tmp_path, "word")


def _mentions(document: Document) -> list[tuple[str, str]]:
    return [
        ("".join(document.text[s.start : s.end].split()), s.label)
        for s in document.spans
    ]


def test_generation_is_fast() -> None:
    """Well over the 5,000 sentences a second that scaling benchmarks need (best of
    three)."""
    best = 0.0
    for seed in range(3):
        start = time.process_time()
        generated = generate(3, 2000, seed)
        seconds = time.process_time() - start
        best = max(
            best,
            sum(len(d.sentences) for s in generated for d in documents(s)) / seconds,
        )
    assert best > 5000
