"""Which tensors have a row per word."""

from __future__ import annotations

from fednotes.core.word_tables import find_word_tables


def test_word_tables_are_recognised_by_name() -> None:
    """Names as Transformers and this package give them, sorted by hand."""
    tables = (
        "bert.embeddings.word_embeddings.weight embedding words.weight words.hashed "
        "tagger.words.weight model.shared.weight shared.weight model.decoder.embed_tokens.weight "
        "transformer.wte.weight lm_head.weight lm_head.bias lm_head.decoder.weight "
        "cls.predictions.decoder.weight cls.predictions.bias vocab_projector.bias "
        "final_logits_bias Embedding.weight new_embedder.table"
    ).split()
    others = (
        "bert.embeddings.position_embeddings.weight bert.embeddings.token_type_embeddings.weight "
        "bert.embeddings.LayerNorm.weight model.encoder.embed_positions.weight "
        "model.encoder.layernorm_embedding.bias characters.embedding tagger.characters.embedding "
        "lstm.weight_ih_l0 crf.transitions cls.predictions.transform.dense.weight "
        "vocab_transform.weight vocab_layer_norm.bias lm_head.dense.weight lm_head.layer_norm.bias "
        "classifier.bias classifier.words.weight keywords.weight not_shared.weight lora.layer.0.query.down"
    ).split()
    assert find_word_tables([*others, *tables]) == tuple(sorted(tables))
