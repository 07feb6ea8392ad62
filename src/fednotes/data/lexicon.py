"""Names and phrases of the synthetic corpus: made-up drugs, findings in Greek and Latin roots.

Nothing here is anyone's data. Drug names come from syllables and the affixes that name drug
classes, findings from medical roots and endings, so a tagger can learn from a name's form
what to make of a name that it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


def _list(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


_ONSET = _list(
    "al am ar be bi ca ce clo cor da de di do el en fa fe flu ga ge ha ib il ke la le lo lu "
    "ma me mi mo na ne ni no or ox pa pe pi pra que ra re ri ro sa se si so ta te ti tra va "
    "ve vi xa ze zo",
)
_MIDDLE = _list(
    "ba bi bo ca ce cla da do dro fa fe fo ga li lo lu ma me mi mo na ni no pa pe pi po ra "
    "re ri ro sa si so ta te ti to va ve vo xa zi zo",
)
_CLASS = _list(
    "mab pril sartan statin olol dipine azole cillin mycin floxacin oxetine azepam triptan "
    "gliptin prazole tidine caine parin tinib vir cycline profen zosin setron lukast "
    "glitazone dronate barbital nib stat mide zine done pine one ate ine ol in",
)
_BRAND_END = _list("ia ra ex or yl an vo ix um ena ista aro enz iq era on il ax")
_ROOTS = _list(
    "cardi hepat nephr gastr dermat neur arthr my oste cyst bronch encephal col enter mening "
    "pancreat thyroid rhin laryng phleb vascul gloss blephar conjunctiv stomat spondyl "
    "tendin chol pleur pneumon prostat ot ophthalm myel angi aden lymph chondr splen trache "
    "cheil esophag mast vagin urethr fasci burs retin kerat scler pharyng",
)
_ENDINGS = _list(
    "itis algia opathy oma osis omegaly otoxicity orrhagia orrhea odynia oedema openia "
    "oplegia osclerosis ospasm omalacia otrophy oparesis",
)
_COURSE = _list("acute chronic recurrent idiopathic bilateral diffuse")
_COMPLAINT = _list(
    "pain|swelling|numbness|weakness|burning|tightness|itching|bleeding|stiffness|tingling|"
    "cramps|spasms|rash|bruising|tenderness|heaviness",
    "|",
)
_BODY = _list(
    "chest leg arm neck back abdomen knee shoulder jaw hand foot eye throat hip scalp wrist "
    "ankle groin face calf flank stomach",
)
_LAY = _list(
    "blurred vision|weight gain|weight loss|dry mouth|loss of appetite|shortness of breath|"
    "brain fog|night sweats|hair loss|hot flashes|mood swings|palpitations|nausea|vomiting|"
    "diarrhea|fatigue|insomnia|dizziness|fever|cough|chills|confusion|tremor|constipation|"
    "heartburn|headache|migraine|ringing in the ears|vivid dreams|memory loss|low libido|"
    "sweating|anxiety|panic|drowsiness|hives|fainting|lightheadedness|bloating|joint pain|"
    "muscle aches|brain zaps|suicidal thoughts|feeling like a zombie|no sex drive|"
    "unable to sleep|a racing heart|hearing voices|loss of taste|double vision|"
    "slurred speech|a metallic taste|seizures|hypotension|bradycardia|jaundice|hyponatremia|"
    "syncope|delirium|anaphylaxis|angioedema",
    "|",
)
_STATE = _list(
    "failure|insufficiency|carcinoma|disease|stenosis|infarction|abscess|fibrosis|ischemia|"
    "hemorrhage|cancer|dysplasia|thrombosis",
    "|",
)
_ADJECTIVE = _list(
    "cardiac hepatic renal gastric pulmonary cerebral pancreatic biliary colonic splenic "
    "thyroid prostatic ovarian esophageal duodenal vascular aortic mitral coronary venous",
)
_EPONYM_END = _list("er man sen ström mann wick ford ley ini ov eau ton")
_DISEASES = _list(
    "hypertension|type 2 diabetes|asthma|COPD|CHF|GERD|depression|epilepsy|gout|lupus|"
    "psoriasis|sepsis|pneumonia|anemia|obesity|bipolar disorder|atrial fibrillation|"
    "rheumatoid arthritis|multiple sclerosis|HIV|DVT|tuberculosis|schizophrenia|ADHD|OCD|"
    "sleep apnea|UTI|CAD",
    "|",
)
_TESTED = _list(
    "sodium creatinine bilirubin lactate hemoglobin troponin albumin amylase lipase ferritin "
    "ammonia cortisol prolactin platelet INR TSH CRP ALT AST BUN glucose potassium calcium "
    "iron magnesium insulin vitamin",
)
_IMAGING = _list(
    "CT MRI ultrasound biopsy angiogram scan x-ray doppler radiograph scintigraphy",
)
_ELECTROLYTES = _list("glucose potassium calcium iron magnesium insulin")

PEOPLE = _list(
    "Martin Keller Osei Lindqvist Moreau Tanaka Rossi Novak Okafor Petrov Hansen Garcia "
    "Doyle Silva Varga Mabry Statham Olsen Prill Amato Vance Coline Irvine Pinero Sartain",
)
PLACES = _list(
    "Lakeside Riverton Ashford Maribel Oxley Novara Valparin Kettering Selma Zoline",
)
ORGS = _list(
    "Clinic|Hospital|Laboratories|Pharmacy|Medical Center|Insurance|Health|Institute",
    "|",
)
DEVICES = _list("pump catheter monitor stent brace inhaler patch drain pacemaker walker")
MONTHS = _list("January February March April May June July August September October")


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Names by kind, the commonest first; how often each is used is up to a site."""

    drug: tuple[str, ...]
    finding: tuple[str, ...]
    disease: tuple[str, ...]
    test: tuple[str, ...]
    org: tuple[str, ...]
    device: tuple[str, ...]
    brand: tuple[str, ...]


def make_lexicon(rng: np.random.Generator, size: int = 1500) -> Lexicon:
    """About `size` drugs and findings and half as many diseases. A function of `rng` alone."""
    brands = _unique(rng, size // 3, lambda: _join(rng, (_ONSET, _MIDDLE, _BRAND_END)).title())
    generics = _unique(
        rng,
        size - len(brands) - len(_ELECTROLYTES),
        lambda: _join(rng, (_ONSET, _MIDDLE, _CLASS) if rng.random() < 0.7 else (_ONSET, _CLASS)),
    )
    companies = _unique(rng, 200, lambda: _join(rng, (_ONSET, _MIDDLE, _BRAND_END)).title())
    orgs = [f"{name} {_one(rng, ORGS)}" for name in companies[:90]]
    orgs += [f"{_one(rng, PLACES)} {_one(rng, ORGS)}" for _ in range(30)]
    devices = [f"{name} {_one(rng, DEVICES)}" for name in companies[90:]] + list(DEVICES)
    return Lexicon(
        drug=_shuffled(rng, [*brands, *generics, *_ELECTROLYTES]),
        finding=_shuffled(rng, _unique(rng, size, lambda: _finding(rng))),
        disease=_shuffled(rng, _unique(rng, size // 2, lambda: _disease(rng))),
        test=_shuffled(rng, _unique(rng, 180, lambda: _test(rng))),
        org=_shuffled(rng, orgs),
        device=_shuffled(rng, devices),
        brand=_shuffled(rng, companies),
    )


def _finding(rng: np.random.Generator) -> str:
    """A name that may be a disease, a symptom or an adverse effect: the context decides."""
    kind = rng.random()
    if kind < 0.40:
        name = _join(rng, (_ROOTS, _ENDINGS))
        return f"{_one(rng, _COURSE)} {name}" if rng.random() < 0.2 else name
    if kind < 0.60:
        return f"{_one(rng, _COMPLAINT)} in the {_side(rng)}{_one(rng, _BODY)}"
    if kind < 0.78:
        return f"{_side(rng)}{_one(rng, _BODY)} {_one(rng, _COMPLAINT)}"
    return _one(rng, _LAY)


def _disease(rng: np.random.Generator) -> str:
    kind = rng.random()
    if kind < 0.25:
        eponym = (_one(rng, _ONSET) + _one(rng, _MIDDLE) + _one(rng, _EPONYM_END)).title()
        return f"{eponym}{_one(rng, ('', chr(39) + 's'))} {_one(rng, ('syndrome', 'disease'))}"
    if kind < 0.55:
        course = f"{_one(rng, _COURSE)} " if rng.random() < 0.3 else ""
        return f"{course}{_one(rng, _ADJECTIVE)} {_one(rng, _STATE)}"
    if kind < 0.80:
        return _join(rng, (_ROOTS, _ENDINGS))
    return _one(rng, _DISEASES)


def _test(rng: np.random.Generator) -> str:
    kind = rng.random()
    if kind < 0.35:
        return _one(rng, ("", "serum ", "urine ", "")) + _one(rng, _TESTED)
    if kind < 0.55:
        return f"{_one(rng, _TESTED)} level"
    if kind < 0.80:
        return f"{_one(rng, _IMAGING)} of the {_side(rng)}{_one(rng, _BODY)}"
    return f"{_one(rng, _BODY)} {_one(rng, _IMAGING)}"


def _side(rng: np.random.Generator) -> str:
    return _one(rng, ("", "", "left ", "right ", "lower ", "upper "))


def _one(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _join(rng: np.random.Generator, parts: Sequence[Sequence[str]]) -> str:
    return "".join(_one(rng, part) for part in parts)


def _unique(rng: np.random.Generator, count: int, make: Callable[[], str]) -> list[str]:
    """`count` different names, or fewer if the inventory is too small for so many."""
    names: dict[str, None] = {}
    for _ in range(20 * count):
        if len(names) >= count:
            break
        names[make()] = None
    return list(names)


def _shuffled(rng: np.random.Generator, names: list[str]) -> tuple[str, ...]:
    return tuple(names[i] for i in rng.permutation(len(names)).tolist())


# Clauses. {Type} is a mention of that type, {name} any other slot, [a|b] a choice.
# A finding's type is a matter of the whole clause: "X began after D" is an adverse effect,
# "X began after the fall" a symptom, "X improved on D" a disease.
CLAUSES: tuple[str, ...] = (
    # adverse effects
    "{subj} [developed|experienced|suffered|got|ended up with|manifested] [|severe |mild "
    "|marked |florid |awful ]{ADE} [|{dur} ]after [starting|initiation of|the first dose "
    "of|receiving|taking|exposure to|an infusion of|a switch to] {Drug}",
    "{Drug} [caused|gave {obj}|led to|triggered|brought on|precipitated|provoked|was "
    "followed by|left {obj} with] [|severe |terrible |transient |a bout of ]{ADE}",
    "{subj} was [admitted|seen|evaluated] with {Drug}-induced {ADE}",
    "{ADE} [resolved|improved|subsided|disappeared] [|{dur} ]after [stopping|withdrawal "
    "of|discontinuation of|coming off] {Drug}",
    "{Drug} was [stopped|discontinued|held|withdrawn] [because of|due to|owing to|in "
    "view of|on account of|after] {ADE}[|| and {ADE}]",
    "{ADE} [was attributed to|was thought to be due to|was most likely from|was blamed "
    "on|was put down to|pointed to|was traced to] {Drug}",
    "since [starting|going on|taking] {Drug} {subj} had {ADE}[|, {ADE}] and {ADE}",
    "the [worst|main|only] side effect of {Drug} was {ADE}",
    "[allergic to|intolerant of|reaction to] {Drug} ( {ADE} )",
    "{ADE} [began|started|was noted|appeared] {dur} [after|into] {Drug}[|| {Dosage}]",
    "rechallenge with {Drug} [reproduced|brought back] the {ADE}",
    "{Drug} [did not cause|never gave {obj}] {ADE}",
    "{ADE} associated with {Drug} [therapy|treatment|use] [is rare|was described before|"
    "was suspected]",
    "{subj} had to [stop|quit|come off] {Drug} , the {ADE} was [unbearable|too much|dangerous]",
    "{ADE} [began|started|appeared] after {Drug} [|was started|was increased]",
    "{Drug} , [which|and this] [|in the end |unfortunately ][caused|brought] {ADE} , "
    "[was stopped|is not for {obj}]",
    "{ADE} [limited|precluded|ended] [the use of|treatment with|{poss} time on] {Drug}",
    "[on|with|under] {Drug} , {subj} [|soon |gradually ]had [|more |constant ]{ADE}",
    "{subj} [blames|suspected] {Drug} for {poss} {ADE}",
    "beware of {ADE} [with|on] {Drug}",
    # diseases
    "[past medical history of|history of|h/o|known|a background of|PMH significant for|"
    "longstanding] {Disease}[||, {Disease}][|| and {Disease}]",
    "{subj} [was diagnosed with|was found to have|carries a diagnosis of|turned out to "
    "have|lives with] {Disease}[| in {month}| {dur} ago]",
    "{subj} was started on {Drug}[|| {Dosage}] for {Disease}",
    "{Drug} [has been used in|controlled|was given for|is indicated for] {poss} {Disease}",
    "[family history of|{poss} mother had|{poss} brother died of] {Disease}",
    "no [evidence|signs] of {Disease} on {Test}",
    "{Test} [was consistent with|confirmed|suggested|ruled out|showed|revealed] {Disease}",
    "[admitted|transferred|referred] for [management|work-up|treatment] of {Disease}",
    "{subj} suffered from {Disease} since [childhood|{month}|age {num}]",
    "{poss} {Disease} [improved on|responded to|was refractory to|relapsed despite|"
    "flared on|was kept at bay with] {Drug}",
    "{Disease} [began|started|was found] [at birth|in childhood|at age {num}]",
    "{Disease} was [managed|treated] [conservatively|with {Drug}|surgically]",
    "{Drug} and {Drug} were [tried|used|combined] for [refractory |]{Disease}",
    "[given|in light of] {poss} {Disease} , {Drug} was [avoided|preferred|not started]",
    "{Disease} s/p [surgery|{Drug}|stent|radiation]",
    "{Disease} [is|remains] [stable|under control|well controlled] on {Drug}",
    # symptoms
    "{subj} [presented with|complained of|c/o|reported|came in with|has been bothered by|"
    "noticed|describes|is troubled by] [|a {dur} history of |worsening |severe |new |on "
    "and off ]{Symptom}[|| and {Symptom}]",
    "{subj} [denied|denies|never had|had no] {Symptom}[|, {Symptom}] or {Symptom}",
    "{Symptom} [began|started|appeared] [|{dur} ]after [the fall|surgery|lunch|a long "
    "flight|the procedure|moving to {place}|seeing Dr. {person}]",
    "{Symptom} [resolved|improved|subsided|disappeared] [with|after] [rest|fluids|"
    "physiotherapy|a good night|dialysis]",
    "{Drug}[|| {Dosage}] [helped with|relieved|took away|eased|did nothing for|took the "
    "edge off|worked wonders on] {poss} {Symptom}",
    "{poss} {Symptom} was [worse|better|unchanged] [at night|today|this week|on exertion]",
    "on examination there was {Symptom}",
    "{subj} woke up with {Symptom}[|| and {Symptom}]",
    "{Drug} [as needed|p.r.n.] for {Symptom}",
    "call if [there is|you have] {Symptom} or {Symptom}",
    "{subj} developed [|severe |mild ]{Symptom} [|{dur} ]after [surgery|the fall|a run|"
    "seeing the {org}]",
    "{Symptom} [kept {obj} up|came and went|got better|came back] [at night|for {dur}|"
    "without warning]",
    "{poss} [main|chief] complaint was {Symptom}",
    "{subj} had {Symptom} [before|prior to] [starting|taking] {Drug}",
    "with {Symptom} {subj} [went to|called|was sent to] [{org}|Dr. {person}]",
    "{Symptom} , [likely|probably] [viral|from stress|musculoskeletal]",
    # tests
    "{Test} [was|of|came back at] {value}",
    "{Test} was [normal|unremarkable|negative|pending|repeated]",
    "[ordered|scheduled for|underwent|awaiting] [|a repeat ]{Test}",
    "follow up {Test} in {dur}",
    "{Test} {value} , {Test} {value}",
    "[based on|despite] a [normal|negative|low] {Test} , {Drug} was [continued|started|stopped]",
    # drugs and doses
    "{Drug} {Dosage}",
    "{num} . {Drug} {Dosage}[|| for {Disease}]",
    "{subj} [took|was given|received|was on|was loaded with|was maintained on|popped] "
    "{Drug} {Dosage}[|| and {Drug} {Dosage}]",
    "[increased|reduced|tapered] {Drug} to {Dosage}",
    "{subj} was switched from {Drug} to {Drug}",
    "[discharged|sent home] on {Drug} , {Drug} and {Drug}",
    "[continue|hold|resume] {Drug}",
    "the dose of {Drug} was [doubled|missed|too high]",
    "{subj} [tried|took] {Drug} for {dur}",
    "{Drug} level was [low|high|pending]",
    "{Drug} , {dur} , [worked|failed|no effect]",
    "{subj} [ran out of|forgot|refused] {Drug}",
    "{Dosage} of {Drug} [|at bedtime|with food]",
    # nothing to find
    "seen by Dr. {person} at {org}[| in {month}]",
    "{org} [sent|supplied|recalled] the {device} in {month}",
    "the {device} was [placed|removed|replaced] without [complication|trouble]",
    "blood pressure was {num}/{num} and pulse {num}",
    "{person} from {org} will call in {dur}",
    "lives with {poss} [wife|son|mother|cat] in {place}",
    "{subj} [waited|paid] {num} [minutes|dollars] at {org} in {place}",
    "{subj} was [admitted|taken] to {org} [for {dur}|in {month}]",
    "after {dur} at {org} {subj} was [better|tired|discharged]",
    "{subj} [started|stopped] the {device} after seeing {person}",
    "thanks to {person} and all of {org}",
    "{brand} [was replaced|was placed|beeped|broke|is made by {org}]",
    "{brand} [called|sent the bill|wrote back|is closed in {month}]",
    "{subj} [moved to|works at|went to|is followed at] {brand} [in {month}|for {dur}]",
    "[after|since] the {device} {subj} was [better|fine|home]",
    "{num} mg/dL is the upper limit at {org}",
)

LEADS: dict[str, tuple[str, ...]] = {
    "discharge": (
        "",
        "",
        "",
        "HOSPITAL COURSE : ",
        "On day {num} ",
        "Overnight ",
        "In the ED ",
        "Per Dr. {person} , ",
        "Plan : ",
        "Of note , ",
    ),
    "reports": (
        "",
        "",
        "We report that ",
        "Interestingly , ",
        "In {month} , ",
        "Later , ",
        "A {num}-year-old [man|woman] was seen : ",
        "In this case , ",
        "To our knowledge , ",
    ),
    "posts": (
        "",
        "",
        "ok so ",
        "Hi all , ",
        "Well , ",
        "just saying , ",
        "so after {dur} , ",
        "UGH ",
        "fwiw ",
        "Update : ",
    ),
}
SUBJECTS: dict[str, tuple[str, ...]] = {
    "discharge": ("pt", "the patient", "she", "he", "Mr. {person}", "Ms. {person}"),
    "reports": ("the patient", "she", "he", "a {num}-year-old man", "our patient", "the woman"),
    "posts": ("I", "I", "I", "my husband", "my mom", "my son"),
}
POSSESSIVES = {
    "discharge": ("his", "her", "the"),
    "reports": ("his", "her", "the"),
    "posts": ("my", "my", "the"),
}
OBJECTS = {"discharge": ("pt", "her", "him"), "reports": ("her", "him"), "posts": ("me", "her")}
JOINS: dict[str, tuple[str, ...]] = {
    "discharge": (" ; ", " , ", " . "),
    "reports": (" , and ", " , while ", " ; "),
    "posts": (" and ", " but ", " so ", " ... "),
}
ENDS: dict[str, tuple[str, ...]] = {
    "discharge": (".", " .", "."),
    "reports": (".",),
    "posts": (".", "!", "", "...", "!!"),
}
DURATIONS = _list(
    "two days|3 weeks|a month|6 months|10 days|several hours|a week|2 years|one day|48 hours|"
    "three months",
    "|",
)
DOSAGES = _list(
    "{n} mg|{n} mg|{n}mg|{n} mg daily|{n} mg b.i.d.|{n} mcg|{n} units|{n} g|two tablets|"
    "half a pill|one tablet t.i.d.|{n} mg/kg|{n} mg p.o. q.d.|{n} ml",
    "|",
)
VALUES = _list("{n} mg/dL|{n}|{n} mmol/L|{n} %|{n} units/L|{n} g/dL|normal|elevated at {n}", "|")
