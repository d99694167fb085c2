import re
from collections import Counter, defaultdict
from itertools import islice
from random import Random

import pytest

from dp_core.data.labelled_text import entities
from dp_core.data.tokens import split_words
from tasks.demo_data.entities import labelled_sentences, surfaces, tokenised
from tasks.demo_data.notes import NOTE_TYPES, SECTIONS, Narrator, labelled_notes, notes
from tasks.demo_data.public_text import public_text
from tasks.demo_data.synthetic_patients import CONDITIONS, DRUGS, LABS, Patient
from tasks.demo_data.templates import Span, expand, phrase

PATIENTS = 400


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return [d.text for d in notes(PATIENTS, 1)]


def test_equal_seeds_give_equal_notes_and_different_seeds_different_notes():
    assert list(notes(20, 1)) == list(islice(notes(30, 1), len(list(notes(20, 1)))))
    assert {d.text for d in notes(20, 1)}.isdisjoint(d.text for d in notes(20, 2))


def test_document_ids_are_unique_and_patients_have_at_most_six_notes():
    docs = list(notes(PATIENTS, 1))
    assert len({d.document_id for d in docs}) == len(docs)
    per_patient = Counter(d.patient_id for d in docs)
    assert len(per_patient) == PATIENTS
    assert max(per_patient.values()) <= 6
    assert sum(n <= 3 for n in per_patient.values()) > 0.7 * PATIENTS
    assert all(d.admission_id.startswith(d.patient_id) for d in docs)


def test_notes_have_60_to_150_words_and_a_varied_vocabulary(corpus):
    lengths = sorted(len(t.split()) for t in corpus)
    assert lengths[len(lengths) // 20] >= 50
    assert lengths[-len(lengths) // 20] <= 160
    words = Counter(w for t in corpus for w in split_words(t))
    assert len(words) > 2500
    assert sum(n for _, n in words.most_common(100)) < 0.6 * words.total()
    assert len(set(corpus)) == len(corpus)
    text = "\n".join(corpus)
    for sign in (r"\bpt\b", r"\b\d{2,3}/\d{2}\b", r"\d mg\b", r"Dr\. [A-Z]", r"s/p|w/", r"\bbid\b"):
        assert re.search(sign, text)


def test_diseases_of_a_patient_predict_the_drugs_in_the_notes(corpus):
    """Notes that name a disease contain its drugs more than three times as often."""
    notes_by_terms: Counter[tuple[bool, bool]] = Counter()
    for text in corpus:
        words = set(split_words(text))
        for condition in CONDITIONS:
            named = any(f" {name} " in text for name in condition["names"])
            notes_by_terms[named, bool(words & set(condition["drugs"]))] += 1

    def share_with_drug(named: bool) -> float:
        with_drug, without_drug = notes_by_terms[named, True], notes_by_terms[named, False]
        return with_drug / (with_drug + without_drug)

    assert share_with_drug(named=True) > 3 * share_with_drug(named=False)


def test_sex_and_age_agree_in_all_notes_of_a_patient():
    sexes = defaultdict(set)
    ages = defaultdict(set)
    for d in notes(PATIENTS, 1):
        sexes[d.patient_id] |= set(re.findall(r"\b(M[rs]s?)\. ", d.text))
        ages[d.patient_id] |= set(re.findall(r"(\d+) (?:year old|yo)\b", d.text))
    assert max(len(s) for s in sexes.values()) == 1
    assert max(len(a) for a in ages.values()) == 1
    assert len(set().union(*ages.values())) > 40


def test_every_template_expands_without_remaining_braces():
    rng = Random(0)
    for section in SECTIONS.values():
        for template in section.templates * 5:
            spans = expand(template, rng, Narrator(Patient(rng), rng).fill)
            text = "".join(t for t, _ in spans)
            assert not re.search(r"[{}|]|  ", text), text
            assert all(t.strip() == t for t, label in spans if label), text


def test_tables_refer_only_to_existing_sections_labs_and_drugs():
    assert {name for kind in NOTE_TYPES for name in kind.fields["sections"]} == set(SECTIONS)
    for condition in CONDITIONS:
        assert len(condition) == 8 and all(condition.values())
        assert set(condition["labs"]) <= set(LABS)
        assert set(condition["drugs"]) <= set(DRUGS)
        for field in ("symptoms", "findings", "procedures"):
            assert all(phrase(template, Random(1)) for template in condition[field])


def test_labelled_sentences_hold_the_entities_of_their_lines():
    note = next(labelled_notes(1, 1, "x"))
    for line in note.lines:
        sentence = tokenised(line, "d")
        expected = [(label, "".join(split_words(text))) for text, label in line.spans if label]
        labelled = [
            (kind, "".join(split_words(" ".join(sentence.tokens[a:b]))))
            for kind, a, b in entities(sentence.tags)
        ]
        assert labelled == expected


def test_test_sentences_contain_both_known_and_unseen_entities():
    train, test = labelled_sentences(900, seed=3)
    assert (len(train), len(test)) == (900, 240)
    assert labelled_sentences(900, seed=3) == (train, test)
    kinds = Counter(k for s in train for k, _, _ in entities(s.tags))
    assert set(kinds) == {"problem", "test", "treatment"}
    assert min(kinds.values()) > 100
    assert any(set(s.tags) == {"O"} for s in train)
    known = {x for s in train for x in surfaces(s)}
    tested = [x for s in test for x in surfaces(s)]
    unseen = sum(x not in known for x in tested) / len(tested)
    assert 0.2 < unseen < 0.7  # memorising the training part is not enough, and not useless


def test_labelled_sentences_share_no_note_with_the_corpus():
    corpus = {d.text for d in notes(200, 3)}
    for stream in ("entities, training", "entities, test"):
        assert corpus.isdisjoint(n.document.text for n in labelled_notes(200, 3, stream))


def _long_words(texts: list[str]) -> Counter[str]:
    return Counter(w for t in texts for w in split_words(t) if w.isalpha() and len(w) > 3)


def test_public_text_shares_few_words_with_the_notes(corpus):
    public = [d.text for d in public_text(400, 1)]
    assert public == [d.text for d in public_text(400, 1)]
    public_words, clinical_words = _long_words(public), _long_words(corpus)
    shared = sum(n for w, n in clinical_words.items() if w in public_words) / clinical_words.total()
    assert shared < 0.25
    assert all(d.patient_id == "" for d in public_text(5, 1))
    assert len(public_words) > 500


def upper(name: str) -> list[Span]:
    return [(name.upper(), "label")]


def test_choices_nest_and_text_in_a_slot_keeps_its_label():
    rng = Random(0)
    phrases = {phrase("a (b|c(d|)|) e", rng) for _ in range(200)}
    assert phrases == {"a b e", "a cd e", "a c e", "a  e"}
    assert expand("x {drug} y", rng, upper) == [("x ", ""), ("DRUG", "label"), (" y", "")]


@pytest.mark.parametrize("template", ["a (b", "a b)", "a {b", "(a|{b)", "{drug}"])
def test_templates_with_unbalanced_brackets_or_unknown_slots_are_refused(template):
    with pytest.raises(ValueError, match="template"):
        phrase(template, Random(0))
