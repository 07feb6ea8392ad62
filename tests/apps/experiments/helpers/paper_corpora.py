"""Invented stand-ins for the papers' corpora and models, in the layout of the
originals.

Every text is made of a few templates, so that tiny models find something to learn.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tiny_models import WORDS, save_bart, save_bert

DRUGS = "aspirin ibuprofen codeine heparin insulin statin".split()
EFFECTS = "rash nausea cough fever pain cramps".split()
DISEASES = "asthma diabetes hypertension gout".split()
PLAIN = (
    "the patient was well today with no other complaint and he went home in the".split()
)
GENRES = ("nw", "tc", "wb", "bn", "bc", "mz")
ONTONOTES_TYPES = (
    *(
        "PERSON",
        "NORP",
        "FAC",
        "ORG",
        "GPE",
        "LOC",
        "PRODUCT",
        "EVENT",
        "WORK_OF_ART",
        "LAW",
    ),
    *(
        "LANGUAGE",
        "DATE",
        "TIME",
        "PERCENT",
        "MONEY",
        "QUANTITY",
        "ORDINAL",
        "CARDINAL",
    ),
)
CLINIC_TYPES = ("Drug", "ADE", "Disease", "Finding", "Symptom")
Sentence = list[tuple[str, str]]  # words with their entity type, empty for none


# What the papers' own corpora take the place of, by the folder of the experiment.
PAPERS = {
    "fedner": {"real": "fedner/paper"},
    "tagsets": {"maccrobat": "tagsets/clinic", "gum": "tagsets/ontonotes"},
    "bert": {
        "maccrobat": "bert/i2b2-2010",
        "bc5cdr": "bert/i2b2-2012",
        "pretrain": "bert/mimic",
        "pretrain-sources": "bert/mimic",
    },
    "phenotype": {
        "codiesp": "phenotype/obesity",
        "codiesp-codes": "phenotype/mimic",
        "demo": "phenotype/demo",
    },
    "pays": {
        "maccrobat": "bert/i2b2-2010",
        "bc5cdr": "bert/i2b2-2012",
        "types-maccrobat": "tagsets/clinic",
        "types-gum": "tagsets/ontonotes",
        "fedner": "fedner/paper",
        "notes": "bert/mimic",
    },
}


def sentence(number: int, types: Sequence[str]) -> Sentence:
    """Return a sentence with a mention of each type; the number makes its words differ."""
    words: Sentence = [(f"case{number}", ""), ("took", "")]
    for at, label in enumerate(types):
        forms = (DRUGS, EFFECTS, DISEASES)[at % 3]
        words.append((forms[(number + at) % len(forms)], label))
        words.append((PLAIN[(number * 3 + at) % len(PLAIN)], ""))
    return [*words, (".", "")]


def text_of(words: Sentence) -> str:
    """Return the words with blanks between them."""
    return " ".join(word for word, _ in words)


def spans_of(words: Sentence) -> Iterator[tuple[int, int, str, str]]:
    """Yield start, end, type and text of each mention."""
    at = 0
    for word, label in words:
        if label:
            yield at, at + len(word), label, word
        at += len(word) + 1


def write_brat(
    texts: Path, annotations: Path, types: Sequence[str], number: int
) -> None:
    """Write one note of two sentences for each number, as CADEC has them in two
    folders."""
    texts.mkdir(parents=True, exist_ok=True)
    annotations.mkdir(parents=True, exist_ok=True)
    for i in range(number):
        lines, rows, start = [], [], 0
        for k in (2 * i, 2 * i + 1):
            words = sentence(k, types)
            for begin, end, label, form in spans_of(words):
                rows.append(
                    f"T{len(rows) + 1}\t{label} {start + begin} {start + end}\t{form}"
                )
            lines.append(text_of(words))
            start += len(lines[-1]) + 1
        (texts / f"POST.{i}.txt").write_text("\n".join(lines) + "\n")
        (annotations / f"POST.{i}.ann").write_text("\n".join(rows) + "\n")


def write_ade(folder: Path, number: int) -> None:
    """Write the three files of the ADE Corpus V2."""
    folder.mkdir(parents=True, exist_ok=True)
    effects, doses, negative = [], [], []
    for i in range(number):
        drug, effect = DRUGS[i % 6], EFFECTS[i // 6 % 6]
        text = f"Case{i} had {effect} after {drug} was given ."
        row = [str(1000 + i), text]
        for form in (effect, drug):
            row += [form, str(text.index(form)), str(text.index(form) + len(form))]
        effects.append("|".join(row))
        if i % 3 == 0:
            text = f"Case{i} was given 5 mg of {drug} ."
            row = [str(1000 + i), text]
            for form in ("5 mg", drug):
                row += [form, str(text.index(form)), str(text.index(form) + len(form))]
            doses.append("|".join(row))
        negative.append(f"{1000 + i} NEG Case{i} was well .")
    (folder / "DRUG-AE.rel").write_text("\n".join(effects) + "\n")
    (folder / "DRUG-DOSE.rel").write_text("\n".join(doses) + "\n")
    (folder / "ADE-NEG.txt").write_text("\n".join(negative) + "\n")


def write_conll(path: Path, types: Sequence[str], first: int, number: int) -> None:
    """Write words with BIO tags, a document for every two sentences."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(first, first + number):
        if (i - first) % 2 == 0:
            lines.append(f"# newdoc id = d{i}")
        lines += [f"{w}\t{f'B-{t}' if t else 'O'}" for w, t in sentence(i, types)] + [
            ""
        ]
    path.write_text("\n".join(lines) + "\n")


def write_ontonotes(folder: Path) -> None:
    """Write CoNLL-2012 columns, a folder for each part and genre."""
    at = 0
    for part, number in (("train", 8), ("development", 3), ("test", 3)):
        for genre in GENRES:
            rows = [f"#begin document ({genre}/x); part 000"]
            for _ in range(number):
                at += 1
                for k, (word, label) in enumerate(sentence(at, ONTONOTES_TYPES)):
                    name = f"({label})" if label else "*"
                    rows.append(f"{genre}/x 0 {k} {word} X * - - - - {name} -")
                rows.append("")
            place = folder / part / genre
            place.mkdir(parents=True)
            (place / "x.gold_conll").write_text(
                "\n".join([*rows, "#end document"]) + "\n"
            )


def write_clinic(folder: Path) -> None:
    """Write the three corpora annotated anew, as brat and JSONL; CADEC says ADR for
    ADE."""
    cadec = tuple("ADR" if label == "ADE" else label for label in CLINIC_TYPES)
    write_brat(folder / "cadec" / "text", folder / "cadec" / "original", cadec, 15)
    for name, first in (("ade", 100), ("smm4h", 200)):
        rows = []
        for i in range(first, first + 30):
            words = sentence(i, CLINIC_TYPES)
            spans = [
                {"start": a, "end": b, "label": label}
                for a, b, label, _ in spans_of(words)
            ]
            rows.append(json.dumps({"text": text_of(words), "spans": spans}))
        (folder / name).mkdir()
        (folder / name / "notes.jsonl").write_text("\n".join(rows) + "\n")


def note(number: int) -> str:
    """Return an invented note of a few sentences."""
    lines = []
    for k in range(4):
        drug = DRUGS[(number + k) % 6]
        effect = EFFECTS[(number * 5 + k) % 6]
        disease = DISEASES[(number + 2 * k) % 4]
        lines.append(f"The patient has {disease} and had {effect} on {drug} {number} .")
    return "\n".join(lines)


def write_mimic(folder: Path, patients: int = 60) -> None:
    """Write MIMIC-III's tables, the notes packed as PhysioNet gives them."""
    folder.mkdir(parents=True)
    notes = [
        "ROW_ID,SUBJECT_ID,HADM_ID,CHARTDATE,CHARTTIME,STORETIME,CATEGORY,DESCRIPTION,CGID,"
        "ISERROR,TEXT"
    ]
    diagnoses = ["ROW_ID,SUBJECT_ID,HADM_ID,SEQ_NUM,ICD9_CODE"]
    procedures = ["ROW_ID,SUBJECT_ID,HADM_ID,SEQ_NUM,ICD9_CODE"]
    services = [
        "ROW_ID,SUBJECT_ID,HADM_ID,COSTCENTER,CHARTDATE,CPT_CD,CPT_NUMBER,CPT_SUFFIX,"
        "TICKET_ID_SEQ,SECTIONHEADER,SUBSECTIONHEADER,DESCRIPTION"
    ]
    for i in range(patients):
        head = f"{i},{100 + i},{2000 + i}"
        notes.append(
            f'{head},2130-01-05,,,"Discharge summary","Report",,,"{note(i)}\n"'
        )
        notes.append(
            f'{i + 1000},{100 + i},,2130-01-05,,,"Nursing","Report",,,"{note(i + 7)}"'
        )
        diagnoses.append(f'{head},1,"{("4019", "25000", "49390", "2749")[i % 4]}"')
        procedures.append(f'{head},1,"{("0331", "3605")[i % 2]}"')
        services.append(
            f'{head},"ICU",,"{("99254", "94002")[i % 2]}",99254,,1,"E","C",'
        )
    (folder / "NOTEEVENTS.csv.gz").write_bytes(
        gzip.compress("\n".join(notes).encode() + b"\n")
    )
    for name, rows in (
        ("DIAGNOSES_ICD", diagnoses),
        ("PROCEDURES_ICD", procedures),
        ("CPTEVENTS", services),
    ):
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")


def write_umls(folder: Path) -> None:
    """Write MRCONSO.RRF, MRSTY.RRF and vectors of the concepts."""
    folder.mkdir(parents=True)
    terms = [
        (f"C{at:07d}", term) for at, term in enumerate((*DISEASES, *EFFECTS, *DRUGS), 1)
    ]
    names = [
        f"{cui}|ENG|P|L{cui}|PF|S{cui}|Y|A{cui}||M|D|SNOMEDCT_US|PT|1|{term}|0|N||"
        for cui, term in terms
    ]
    kinds = [f"{cui}|T047|B2.2.1.2.1|Disease or Syndrome|AT{cui}||" for cui, _ in terms]
    (folder / "MRCONSO.RRF").write_text("\n".join(names) + "\n")
    (folder / "MRSTY.RRF").write_text("\n".join(kinds) + "\n")
    numbers = " ".join(["1.25 -0.5 0.75"] * 100)  # 300, as the paper's
    vectors = [f"{cui} {numbers}" for cui, _ in terms]
    (folder / "cuis.txt").write_text("\n".join(vectors) + "\n")


def write_obesity(folder: Path, train: int = 36, test: int = 12) -> None:
    """Write records and judgements of the i2b2 2008 obesity challenge."""
    folder.mkdir(parents=True)
    for part, first, last in (
        ("training", 1, train),
        ("test", train + 1, train + test),
    ):
        ids = range(first, last + 1)
        texts = "".join(f'<doc id="{i}"><text>\n{note(i)}\n</text></doc>' for i in ids)
        records = f"<root><docs>{texts}</docs></root>"
        (folder / f"obesity_patient_records_{part}.xml").write_text(records)
        judged = ""
        for at, disease in enumerate(("Asthma", "Diabetes", "Hypertension", "Gout")):
            rows = "".join(
                f'<doc id="{i}" judgment="{"YN"[(i + at) % 2]}" />' for i in ids
            )
            judged += f'<disease name="{disease}">{rows}</disease>'
        standoff = (
            f'<diseaseset><diseases source="intuitive">{judged}</diseases></diseaseset>'
        )
        (folder / f"obesity_standoff_annotations_{part}.xml").write_text(standoff)


def write_i2b2_2010(folder: Path) -> None:
    """Write texts and concepts, the training data in the folders of two hospitals."""
    types = ("treatment", "problem", "test")
    training = folder / "concept_assertion_relation_training_data"
    places = [training / "beth", training / "partners"]
    places.append(folder / "reference_standard_for_test_data")
    for at, place in enumerate(places):
        texts = place / "txt"
        if at == 2:
            texts = folder / "test_data"
        concepts = place / ("concept" if at < 2 else "concepts")
        texts.mkdir(parents=True)
        concepts.mkdir(parents=True)
        for i in range(80 if at < 2 else 24):
            lines, rows = [], []
            words = sentence(100 * at + i, types)
            for n, (word, label) in enumerate(words):
                if label:
                    rows.append(f'c="{word}" 1:{n} 1:{n}||t="{label}"')
            lines.append(text_of(words))
            (texts / f"r{at}-{i}.txt").write_text("\n".join(lines) + "\n")
            (concepts / f"r{at}-{i}.con").write_text("\n".join(rows) + "\n")


def write_i2b2_2012(folder: Path) -> None:
    """Write the XML of the temporal challenge; offsets count the line break before the
    text."""
    types = (
        "TREATMENT",
        "PROBLEM",
        "TEST",
        "CLINICAL_DEPT",
        "EVIDENTIAL",
        "OCCURRENCE",
    )
    parts = (
        "2012-07-15.original-annotation.release",
        "2012-08-08.test-data.event-timex-groundtruth/xml",
    )
    for at, part in enumerate(parts):
        (folder / part).mkdir(parents=True)
        for i in range(160 if at == 0 else 24):
            words = sentence(300 + 200 * at + i, types)
            tags = "".join(
                f'<EVENT id="E{n}" start="{a + 1}" end="{b + 1}" text="{form}" '
                f'modality="FACTUAL" polarity="POS" type="{label}" />\n'
                for n, (a, b, label, form) in enumerate(spans_of(words))
            )
            (folder / part / f"{i}.xml").write_text(
                '<?xml version="1.0" encoding="UTF-8" ?>\n'
                "<ClinicalNarrativeTemporalAnnotation>\n"
                f"<TEXT><![CDATA[\n{text_of(words)}\n]]></TEXT>\n<TAGS>\n{tags}</TAGS>\n"
                "</ClinicalNarrativeTemporalAnnotation>\n"
            )


def write_elmo(folder: Path) -> None:
    """Write a random ELMo of the published layout, its widths tiny."""
    import h5py

    folder.mkdir(parents=True)
    cnn = {
        **{"activation": "relu", "embedding": {"dim": 4}, "filters": [[1, 4], [2, 4]]},
        **{"max_characters_per_token": 50, "n_characters": 262, "n_highway": 1},
    }
    lstm = {
        **{
            "dim": 6,
            "projection_dim": 4,
            "n_layers": 2,
            "cell_clip": 3.0,
            "proj_clip": 3.0,
        },
        "use_skip_connections": True,
    }
    (folder / "elmo_options.json").write_text(
        json.dumps({"char_cnn": cnn, "lstm": lstm})
    )
    shapes: dict[str, tuple[int, ...]] = {"char_embed": (261, 4)}
    for i in range(2):
        shapes |= {f"CNN/W_cnn_{i}": (1, i + 1, 4, 4), f"CNN/b_cnn_{i}": (4,)}
    for part in ("carry", "transform"):
        shapes |= {f"CNN_high_0/W_{part}": (8, 8), f"CNN_high_0/b_{part}": (8,)}
    shapes |= {"CNN_proj/W_proj": (8, 4), "CNN_proj/b_proj": (4,)}
    for way in range(2):
        for layer in range(2):
            cell = f"RNN_{way}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            shapes |= {
                f"{cell}/W_0": (8, 24),
                f"{cell}/B": (24,),
                f"{cell}/W_P_0": (6, 4),
            }
    rng = np.random.default_rng(0)
    with h5py.File(folder / "elmo_weights.hdf5", "w") as file:
        for name, shape in shapes.items():
            file[name] = rng.normal(0, 0.3, shape).astype(np.float32)


def write_vectors(path: Path, dimensions: int) -> None:
    """Write word vectors as GloVe has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = ["took", ".", *DRUGS, *EFFECTS, *DISEASES, *dict.fromkeys(PLAIN)]
    rng = np.random.default_rng(1)
    rows = [
        " ".join([word, *(f"{x:.3f}" for x in rng.normal(size=dimensions))])
        for word in words
    ]
    path.write_text("\n".join(rows) + "\n")


def write_public(folder: Path) -> None:
    """Write the public corpora that experiments on no paper's corpus read."""
    write_conll(folder / "psytar" / "train.txt", ("DI", "ADR", "WD"), 0, 30)
    write_conll(folder / "psytar" / "dev.txt", ("DI", "ADR", "WD"), 100, 8)
    write_conll(folder / "psytar" / "test.txt", ("DI", "ADR", "WD"), 200, 8)
    for name, types in (
        ("bc5cdr", ("Chemical", "Disease")),
        ("ncbi_disease", ("Disease",)),
    ):
        write_conll(folder / name / "train.tsv", types, 300, 30)
        write_conll(folder / name / "devel.tsv", types, 400, 8)
        write_conll(folder / name / "test.tsv", types, 500, 8)
    maccrobat = folder / "maccrobat"
    write_brat(maccrobat, maccrobat, ("Disease_disorder", "Sign_symptom"), 30)
    for part, first, number in (
        ("train", 300, 20),
        ("dev", 400, 12),
        ("test", 500, 12),
    ):
        write_pubtator(
            folder / "bc5cdr" / "pubtator" / f"{part}_corpus.txt", first, number
        )
    write_vectors(folder / "vectors" / "glove.twitter.27B.25d.12k.txt", 25)
    write_codiesp(folder / "codiesp")
    write_disease_ontology(folder / "disease_ontology" / "HumanDO.obo")


def write_pubtator(path: Path, first: int, number: int) -> None:
    """Write a title and an abstract each with mentions, as BC5CDR has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = []
    for i in range(first, first + number):
        title, abstract = (
            sentence(i, ("Chemical", "Disease")),
            sentence(i + 50, ("Chemical",)),
        )
        rows = [f"{i}|t|{text_of(title)}", f"{i}|a|{text_of(abstract)}"]
        start = 0
        for words in (title, abstract):
            for begin, end, label, form in spans_of(words):
                rows.append(f"{i}\t{start + begin}\t{start + end}\t{form}\t{label}\tD1")
            start += len(text_of(words)) + 1
        blocks.append("\n".join(rows))
    path.write_text("\n\n".join(blocks) + "\n\n")


def write_codiesp(folder: Path) -> None:
    """Write coded cases of the training and the development part."""
    codes = (
        "I10",
        "E11.9",
        "F17.2",
        "C77.9",
        "D50.9",
        "N17.9",
        "B20",
        "B18",
        "I26.9",
        "E78.5",
    )
    for part, number in (("train", 40), ("dev", 16)):
        texts = folder / part / "text_files_en"
        texts.mkdir(parents=True)
        rows = []
        for i in range(number):
            (texts / f"{part}{i}.txt").write_text(note(i) + "\n")
            rows += [
                f"{part}{i}\t{codes[(i + k) % len(codes)].lower()}" for k in range(3)
            ]
        (folder / part / f"{part}D.tsv").write_text("\n".join(rows) + "\n")
        (folder / part / f"{part}P.tsv").write_text(f"{part}0\tbw03zzz\n")


def write_disease_ontology(path: Path) -> None:
    """Write the diseases and effects of the notes as terms of an ontology."""
    path.parent.mkdir(parents=True)
    blocks = ["format-version: 1.2"]
    for number, term in enumerate((*DISEASES, *EFFECTS), 1):
        concept = f"xref: UMLS_CUI:C{number:07d}"
        blocks.append(f"[Term]\nid: DOID:{number:07d}\nname: {term}\n{concept}")
    path.write_text("\n\n".join(blocks) + "\n")


def write_all(folder: Path) -> dict[str, str]:
    """Write every stand-in; returns the environment variables that name them."""
    corpora = folder / "corpora"
    labels = ("Drug", "ADR", "Disease", "Finding", "Symptom")
    write_brat(corpora / "cadec" / "text", corpora / "cadec" / "original", labels, 15)
    write_ade(corpora / "ade", 30)
    write_conll(corpora / "smm4h" / "tweets.conll", ("Drug", "ADR"), 600, 30)
    write_vectors(corpora / "glove.6B.300d.txt", 12)
    write_elmo(corpora / "elmo")
    write_public(corpora)
    write_ontonotes(folder / "ontonotes")
    write_clinic(folder / "clinic")
    write_mimic(folder / "mimic")
    write_umls(folder / "umls")
    write_obesity(folder / "obesity")
    write_i2b2_2010(folder / "i2b2-2010")
    write_i2b2_2012(folder / "i2b2-2012")
    words = (*WORDS, "took", *DRUGS, *EFFECTS, *DISEASES, *PLAIN)
    save_bert(folder / "bert-base", words=words, max_position_embeddings=512)
    # as the published encoder's is laid out
    package = folder / "packages" / "tiny_minilm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shape = {"num_hidden_layers": 6, "max_position_embeddings": 512}
    save_bert(package / "model", words=words, head=False, **shape)
    save_bart(folder / "bart-base", max_position_embeddings=256)
    return {
        "FEDNOTES_CORPORA": str(corpora),
        "FEDNOTES_BACKBONE": str(folder / "bart-base"),
        "TINY_MINILM": str(folder / "packages"),
        "BERT_BASE": str(folder / "bert-base"),
        "ONTONOTES": str(folder / "ontonotes"),
        "CLINIC": str(folder / "clinic"),
        "MIMIC_III": str(folder / "mimic"),
        "UMLS_RRF": str(folder / "umls"),
        "CONCEPT_VECTORS": str(folder / "umls" / "cuis.txt"),
        "I2B2_OBESITY": str(folder / "obesity"),
        "I2B2_2010": str(folder / "i2b2-2010"),
        "I2B2_2012": str(folder / "i2b2-2012"),
    }
