"""Tiny random encoders with a vocabulary of a few clinical words, and a tiny BART."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

WORDS = (
    "patient has pain in the chest abdomen left right knee was given aspirin ibuprofen mg daily "
    "denies fever cough nausea no history of asthma diabetes mellitus and hypertension on exam "
    "with mild severe acute chronic after ct scan showed normal blood pressure"
).split()


def save_bert(
    folder: Path,
    *,
    head: bool = True,
    words: Sequence[str] = WORDS,
    lower: bool = True,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Save a BERT of 2 layers of 32 with a vocabulary of `words` and of letters."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,:;()-/"
    entries = [*MARKS, *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(entries))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    names = {f"{m.strip('[]').lower()}_token": m for m in MARKS}
    wrapped = transformers.BertTokenizerFast(
        tokenizer_object=tokenizer, do_lower_case=lower, **names
    )
    wrapped.save_pretrained(folder)
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = transformers.BertForPreTraining if head else transformers.BertModel
        kind(transformers.BertConfig(**settings | changes)).save_pretrained(folder)
    return folder


MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SUB_WORDS = "metop ##rol ##ol nau ##sea no pain took and .".split()


def save_tokenizer(
    path: Path, words: Sequence[str] = SUB_WORDS, **settings: Any
) -> None:
    """Save BERT's tokenizer of these words, which follow the special tokens."""
    import transformers

    path.mkdir(parents=True, exist_ok=True)
    (path / "vocab.txt").write_text("\n".join([*MARKS, *words]))
    vocab = str(path / "vocab.txt")
    transformers.BertTokenizerFast(vocab=vocab, **settings).save_pretrained(path)


def save_encoder(
    path: Path,
    kind: str = "BertModel",
    words: Sequence[str] = SUB_WORDS,
    seed: int = 0,
    **more: Any,
) -> Path:
    """Save an encoder of this class of the library and its tokenizer.

    It has 3 layers of 16, and room for 12 sub-words between the marks, unless `more`
    says otherwise.
    """
    import transformers

    save_tokenizer(path, words)
    shape: dict[str, Any] = {"vocab_size": len(MARKS) + len(words), "hidden_size": 16}
    shape |= {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    shape |= {
        "max_position_embeddings": 14,
        "initializer_range": 0.5,
        "pad_token_id": 0,
    }
    model_class = getattr(transformers, kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class(model_class.config_class(**shape | more)).save_pretrained(path)
    return path


PIECES = "Cloz ind ak ath isia child ren schiz drug ade dis ease find ing with in no pa".split()


def pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a byte-level vocabulary: every letter, and the pieces above letter by
    letter."""
    letters = [*"abcdefghijklmnopqrstuvwxyzACDE.,", "Ġ"]
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *letters]
    merges: list[tuple[str, str]] = []
    for piece in PIECES:
        for size in range(1, len(piece)):
            pair = (piece[:size], piece[size])
            if pair not in merges:
                merges.append(pair)
                words.append("".join(pair))
    return {word: i for i, word in enumerate(words)}, merges


def save_bart(path: Path, **changes: Any) -> Path:
    """Save a BART of 2 + 2 layers of 32, with room for 38 sub-words beside the
    marks."""
    vocabulary, merges = pieces()
    import transformers

    transformers.RobertaTokenizerFast(vocab=vocabulary, merges=merges).save_pretrained(
        path
    )
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 40,
        "init_std": 0.3,
    }
    torch.manual_seed(0)
    transformers.BartModel(
        transformers.BartConfig(**settings | changes)
    ).save_pretrained(path)
    return path
