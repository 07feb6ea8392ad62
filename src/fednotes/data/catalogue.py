"""The corpora that the readers and experiments know: what they are and where to obtain them.

None ships with fednotes. `licence` and `source` tell a person what to expect; the site that
gives a corpus out decides on its terms. Sizes are those of the publications, or of the files.
"""

from __future__ import annotations

from dataclasses import dataclass

from fednotes.core.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Corpus:
    """One corpus.

    name: as used in job files. what: texts and annotation. size: roughly. licence: terms in
    words. source: where a person obtains it. reference: DOI of the publication or official
    site. format: the reader (`data/formats`) that takes it, "" where no notes are annotated
    with spans. types: entity types, if it has any. restricted: needs an agreement.
    """

    name: str
    what: str
    size: str
    licence: str
    source: str
    reference: str
    format: str
    types: tuple[str, ...] = ()
    restricted: bool = False


_N2C2 = "Harvard DBMI data portal (n2c2), after a signed data use agreement"
_N2C2_TERMS = "data use agreement; research only; may not be passed on"

CORPORA: tuple[Corpus, ...] = (
    Corpus(
        "cadec",
        "AskaPatient posts on diclofenac and atorvastatin (CSIRO)",
        "1,253 posts, about 7,600 sentences, about 9,100 mentions",
        "CSIRO data licence, research use",
        "CSIRO Data Access Portal, free registration",
        "doi:10.1016/j.jbi.2015.03.010",
        "brat",
        ("ADR", "Drug", "Disease", "Symptom", "Finding"),
        True,
    ),
    Corpus(
        "ade",
        "ADE Corpus V2: sentences of PubMed case reports with drugs, doses and effects",
        "about 4,300 sentences with relations, 16,700 without",
        "free for research; cite the publication",
        "the authors' project page or a public mirror of ADE-Corpus-V2 (three .rel/.txt files)",
        "doi:10.1016/j.jbi.2012.04.008",
        "ade",
        ("Drug", "ADE", "Dosage"),
    ),
    Corpus(
        "smm4h",
        "tweets with adverse drug reactions (SMM4H shared tasks)",
        "about 2,200 tweets with spans (2019)",
        "tweets may not be passed on; ids and annotation under the task's terms",
        "the shared task's organisers (Health Language Processing Center), after registration",
        "doi:10.18653/v1/W19-3203",
        "jsonl",
        ("Drug", "ADE"),
        True,
    ),
    Corpus(
        "clinic",
        "CADEC beside the texts of ADE and SMM4H, annotated anew with CADEC's five types",
        "three corpora, as above",
        "those of the three corpora",
        "announced by Wang et al. 2023 (Findings of ACL, pages 7449-7463); ask the authors where "
        "the repository is empty",
        "https://github.com/RayWangWR/ClinicDataset",
        "jsonl",
        ("Drug", "ADE", "Disease", "Finding", "Symptom"),
        True,
    ),
    Corpus(
        "psytar",
        "patients' reviews of four psychiatric drugs",
        "891 posts, 5,591 sentences, 5,043 mentions",
        "CC BY 4.0",
        "supplement of the data article",
        "doi:10.1016/j.dib.2019.103838",
        "conll",
        ("ADR", "DI", "SSI", "WD"),
    ),
    Corpus(
        "bc5cdr",
        "PubMed abstracts with chemicals and diseases (BioCreative V CDR)",
        "1,500 abstracts, about 13,900 sentences",
        "public domain (NLM)",
        "BioCreative V track 3 or the NLM",
        "doi:10.1093/database/baw068",
        "pubtator",
        ("Chemical", "Disease"),
    ),
    Corpus(
        "ncbi-disease",
        "PubMed abstracts with disease names and concepts",
        "793 abstracts, about 7,300 sentences, 6,892 mentions",
        "CC0 (NLM)",
        "NCBI, disease corpus page",
        "doi:10.1016/j.jbi.2013.12.006",
        "pubtator",
        ("Disease",),
    ),
    Corpus(
        "maccrobat",
        "full case reports with detailed clinical annotation",
        "200 documents, about 25,000 mentions of 41 types",
        "CC BY 4.0 (as published)",
        "figshare, MACCROBAT 2020",
        "doi:10.6084/m9.figshare.9764942",
        "brat",
        ("Sign_symptom", "Disease_disorder", "Medication", "Diagnostic_procedure", "Dosage"),
    ),
    Corpus(
        "gum",
        "Georgetown University Multilayer corpus: genres with one complete tag set",
        "six genres here: 108 documents, 4,636 sentences",
        "annotation CC BY 4.0; texts CC BY, CC BY-SA and others by genre",
        "gucorpling.org/gum",
        "doi:10.1007/s10579-016-9343-x",
        "conll",
        (
            "abstract",
            "event",
            "person",
            "place",
            "object",
            "time",
            "organization",
            "substance",
            "animal",
            "plant",
        ),
    ),
    Corpus(
        "codiesp",
        "Spanish clinical cases with ICD-10 codes, also machine-translated to English",
        "1,000 coded cases, 3,001 uncoded",
        "CC BY 4.0",
        "Zenodo, or the task page (temu.bsc.es/codiesp)",
        "https://temu.bsc.es/codiesp",
        "",
    ),
    Corpus(
        "i2b2-2008",
        "discharge summaries judged for obesity and 15 comorbidities",
        "1,237 summaries",
        _N2C2_TERMS,
        _N2C2,
        "doi:10.1197/jamia.M3115",
        "",
        (),
        True,
    ),
    Corpus(
        "i2b2-2010",
        "discharge summaries and progress notes: concepts, assertions, relations",
        "871 records as of the challenge; 426 are given out today",
        _N2C2_TERMS,
        _N2C2,
        "doi:10.1136/amiajnl-2011-000203",
        "i2b2",
        ("problem", "test", "treatment"),
        True,
    ),
    Corpus(
        "i2b2-2012",
        "discharge summaries with events, times and temporal relations",
        "310 summaries",
        _N2C2_TERMS,
        _N2C2,
        "doi:10.1136/amiajnl-2013-001628",
        "i2b2-2012",
        ("PROBLEM", "TEST", "TREATMENT", "CLINICAL_DEPT", "EVIDENTIAL", "OCCURRENCE"),
        True,
    ),
    Corpus(
        "n2c2-2018",
        "discharge summaries with drugs, their attributes and adverse events",
        "505 summaries",
        _N2C2_TERMS,
        _N2C2,
        "doi:10.1093/jamia/ocz166",
        "brat",
        ("Drug", "Strength", "Form", "Dosage", "Frequency", "Route", "Duration", "Reason", "ADE"),
        True,
    ),
    Corpus(
        "mimic-iii",
        "intensive care: notes, diagnoses, procedures of one hospital",
        "46,520 patients, about 2.1 million notes",
        "PhysioNet credentialed data use agreement; may not be passed on (the demo: ODbL 1.0)",
        "PhysioNet, after training and an agreement; the demo of 100 patients is open",
        "doi:10.1038/sdata.2016.35",
        "",
        (),
        True,
    ),
    Corpus(
        "mimic-iv-note",
        "discharge summaries and radiology reports of one hospital, 2008 to 2019",
        "331,794 summaries of 145,915 patients, about 2.3 million reports",
        "PhysioNet credentialed data use agreement; may not be passed on",
        "PhysioNet, MIMIC-IV-Note, after training and an agreement",
        "doi:10.13026/1n74-ne17",
        "",
        (),
        True,
    ),
    Corpus(
        "ontonotes",
        "OntoNotes 5.0: English, Chinese and Arabic text of several genres",
        "English: about 1.5 million words, 18 entity types",
        "LDC user agreement; may not be passed on",
        "Linguistic Data Consortium, LDC2013T19; columns of the CoNLL-2012 shared task (release "
        "v12 on cemantix.org/data/ontonotes.html), filled with the LDC's words by its script",
        "doi:10.35111/xmhb-2b84",
        "ontonotes",
        (
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
            "LANGUAGE",
            "DATE",
            "TIME",
            "PERCENT",
            "MONEY",
            "QUANTITY",
            "ORDINAL",
            "CARDINAL",
        ),
        True,
    ),
    Corpus(
        "mts-dialog",
        "doctor-patient dialogues with the sections of notes written from them",
        "1,701 pairs",
        "CC BY 4.0",
        "the authors' public repository",
        "doi:10.18653/v1/2023.eacl-main.168",
        "",
    ),
    Corpus(
        "aci-bench",
        "visit dialogues with full clinical notes",
        "207 encounters",
        "CC BY 4.0",
        "the authors' public repository or figshare",
        "doi:10.1038/s41597-023-02487-3",
        "",
    ),
    Corpus(
        "disease-ontology",
        "names and synonyms of diseases with UMLS, ICD-9 and ICD-10 codes",
        "about 6,600 terms, 16,000 names with a concept (an older CC BY release)",
        "CC BY 3.0 (older releases), CC0 (today)",
        "disease-ontology.org (an OBO file)",
        "doi:10.1093/nar/gkab1063",
        "",
    ),
    Corpus(
        "umls",
        "Metathesaurus: concepts of many vocabularies and their names (MRCONSO.RRF, MRSTY.RRF)",
        "about 3.4 million concepts",
        "UMLS licence, free of charge; some vocabularies have terms of their own",
        "US National Library of Medicine, with a UMLS account (uts.nlm.nih.gov)",
        "doi:10.1093/nar/gkh061",
        "",
        (),
        True,
    ),
)


def find(name: str) -> Corpus:
    """The corpus of that name. Raises ConfigError with the nearest name if there is none."""
    for corpus in CORPORA:
        if corpus.name == name.lower():
            return corpus
    hint = nearest(name.lower(), (c.name for c in CORPORA))
    raise ConfigError(f"no corpus {name!r} in the catalogue: {hint}")
