"""Small tokenizers of the families that models come with, trained on the spot, and
encoders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

FAMILIES = ("bert", "roberta", "modernbert", "xlm-roberta", "deberta-v2")
TEXTS = (
    "Patient has 5.5 mg/dl glucose (high). No fever, no cough!",
    "He was given aspirin 81 mg daily for pain. Denies chest pain; the naïve café résumé.",
    "Temp 37°C, ±2. BP 120/80 mmHg... pain after aspirin; nausea after metoprolol.",
    "took metoprolol (50mg) for pain; nausea, rash and no fever.",
)
WORDPIECE = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def tokenizer_of(family: str, texts: Sequence[str] = TEXTS) -> Any:
    """Return a tokenizer of the library's class for this family, as models publish
    it."""
    import transformers

    if family == "bert":
        return transformers.BertTokenizerFast(vocab=_word_piece(texts))
    if family in ("roberta", "modernbert"):
        return _byte_level(family, texts)
    vocabulary = _unigram(texts, ROBERTA if family == "xlm-roberta" else WORDPIECE)
    if family == "xlm-roberta":
        return transformers.XLMRobertaTokenizerFast(vocab=vocabulary)
    return transformers.DebertaV2TokenizerFast(vocab=vocabulary, unk_id=1)


def save_family(
    folder: Path,
    family: str,
    texts: Sequence[str] = TEXTS,
    positions: int = 256,
    seed: int = 0,
) -> Path:
    """Save a masked language model of this family: its tokenizer and 2 random
    layers."""
    import transformers

    tokenizer = tokenizer_of(family, texts)
    tokenizer.save_pretrained(folder)
    kind = {
        "bert": "Bert",
        "roberta": "Roberta",
        "modernbert": "ModernBert",
        "xlm-roberta": "XLMRoberta",
        "deberta-v2": "DebertaV2",
    }[family]
    # they count positions behind the padding id
    shifted = family in ("roberta", "xlm-roberta")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=positions
        + (tokenizer.pad_token_id + 1 if shifted else 0),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        getattr(transformers, f"{kind}ForMaskedLM")(config).save_pretrained(folder)
    return folder


def _word_piece(texts: Sequence[str]) -> dict[str, int]:
    """The texts' words as BERT parts them, and letters; its trainer's order is not
    fixed."""
    from tokenizers import normalizers, pre_tokenizers

    lower, split = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
    words = [
        word
        for text in texts
        for word, _ in split.pre_tokenize_str(lower.normalize_str(text))
    ]
    letters = sorted({letter for word in words for letter in word})
    full_words = [*words[::2], "37°c", "pain"]  # other words have several pieces
    entries = [
        *WORDPIECE,
        *letters,
        *(f"##{letter}" for letter in letters),
        *full_words,
    ]
    return {word: number for number, word in enumerate(dict.fromkeys(entries))}


def _byte_level(family: str, texts: Sequence[str]) -> Any:
    """RoBERTa's own class; ModernBERT's is the library's general one, around
    tokenizer.json."""
    import transformers
    from tokenizers import (
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    marks = ROBERTA if family == "roberta" else WORDPIECE
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(marks),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if family == "roberta":
        model = json.loads(tokenizer.to_str())["model"]
        merges = [tuple(pair) for pair in model["merges"]]
        return transformers.RobertaTokenizerFast(vocab=model["vocab"], merges=merges)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[
            (mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")
        ],
    )
    names = {f"{mark.strip('[]').lower()}_token": mark for mark in WORDPIECE}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _unigram(texts: Sequence[str], marks: Sequence[str]) -> list[tuple[str, float]]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=list(marks),
        unk_token=marks[1],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts] * 3, trainer)
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    return [(piece, float(score)) for piece, score in pieces]
