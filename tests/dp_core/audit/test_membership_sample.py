from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dp_core.audit.membership import Attack
from dp_core.audit.membership_sample import Sample, draw_sample, levels_above
from dp_core.data.corpus import Document
from dp_core.data.hashing import seed_key
from dp_core.data.privacy_units import is_held_out, units_of
from dp_core.data.token_store import TokenStoreWriter, rows_of_units
from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary import subwords

KEY, S, KEPT, SHARE = seed_key(3), 8, 3, 0.4
WORDS = ("pain", "in", "arm", "leg", "no", "fever", "since", "two")
TOKENIZER = subwords.learn(dict.fromkeys(WORDS, 9), 60)
PATIENTS = 120


def documents(patients: int = PATIENTS) -> list[Document]:
    """Return one to three notes per patient; the first two belong to one admission."""
    rng, made = np.random.default_rng(0), []
    for patient in range(patients):
        for note in range(1 + patient % 3):
            text = " ".join(rng.choice(WORDS, 9))
            made.append(Document(f"d{note}", f"p{patient}", text, f"a{note // 2}"))
    return made


class Cut:
    def __init__(self, folder: Path, unit: PrivacyUnit) -> None:
        self.unit = unit
        sides: dict[bool, TokenStoreWriter] = {
            out: TokenStoreWriter(folder / str(out), S, TOKENIZER.get_vocab_size(), key=KEY)
            for out in (False, True)
        }
        self.held_out: dict[str, bool] = {}
        for u, rows in rows_of_units(
            units_of(documents(), unit, 4),
            TOKENIZER,
            sequence_length=S,
            max_examples_per_unit=KEPT,
            key=KEY,
        ):
            self.held_out[u.unit_id] = is_held_out(u.unit_id, SHARE, KEY)
            side = sides[self.held_out[u.unit_id]]
            side.add_unit(u.unit_id, [row for _, row in rows])
        self.train, self.others = (sides[out].finish() for out in (False, True))

    def sample(self, carries=lambda _: False, most=10_000) -> Sample:
        return draw_sample(
            units_of(documents(), self.unit, 4),
            unit=self.unit,
            train=self.train,
            held_out=self.others,
            tokenizer=TOKENIZER,
            max_examples_per_unit=KEPT,
            carries=carries,
            most=most,
            key=KEY,
        )


@pytest.fixture(params=PrivacyUnit)
def cut(request: pytest.FixtureRequest, tmp_path: Path) -> Cut:
    return Cut(tmp_path, request.param)


def by_group(sample: Sample) -> Attack:
    """Return an attack that scores a row by its position, so that groups are distinguishable."""
    n = len(sample.members)
    return Attack("place", np.arange(n, dtype=np.float64), 0.0, np.ones(n, np.bool_))


def test_members_are_all_rows_that_trained_and_others_all_that_did_not(cut):
    sample = cut.sample()
    assert [store for store, _ in sample.sides] == [cut.train, cut.others]
    for store, numbers in sample.sides:
        assert sorted(numbers.tolist()) == list(range(store.n_rows))
    assert sample.members.tolist() == [True] * cut.train.n_rows + [False] * cut.others.n_rows
    for level in ("sample", "document", "admission", "patient"):
        assert sample.groups[level].shape == sample.members.shape
    assert len(np.unique(sample.groups["sample"])) == len(sample.members)
    # Patients are fitted or measured as a whole.
    assert not set(sample.clusters[sample.fitted]) & set(sample.clusters[~sample.fitted])
    share = len(np.unique(sample.clusters[sample.fitted])) / PATIENTS
    assert 0.1 < share < 0.3


def test_groups_follow_the_documents_that_rows_are_cut_from(tmp_path):
    cut = Cut(tmp_path, PrivacyUnit.PATIENT)
    sample = cut.sample()
    counts = {level: len(np.unique(sample.groups[level])) for level in sample.groups}
    assert counts["patient"] == PATIENTS
    # Every row is cut from one document; a patient's rows come from up to three documents.
    assert counts["patient"] < counts["admission"] < counts["document"] < counts["sample"]
    pairs = set(zip(*(sample.groups[n].tolist() for n in ("patient", "admission")), strict=True))
    assert len(pairs) == counts["admission"]
    assert set(sample.units_in_group) == set(levels_above(PrivacyUnit.PATIENT)) == set()
    np.testing.assert_array_equal(
        np.unique(sample.clusters, return_inverse=True)[1],
        np.unique(sample.groups["patient"], return_inverse=True)[1],
    )


def test_a_carrier_of_canaries_is_on_neither_side(cut):
    carriers = {unit_id for number, unit_id in enumerate(cut.held_out) if number % 3 == 0}
    sample = cut.sample(carries=carriers.__contains__)
    for (store, numbers), out in zip(sample.sides, (False, True), strict=True):
        units = np.unique(np.searchsorted(store.unit_rows, numbers, side="right") - 1)
        kept = [u for u, held in cut.held_out.items() if held is out and u not in carriers]
        assert len(units) == len(kept)


def test_a_sample_is_bounded_and_does_not_depend_on_the_order_of_the_corpus(cut):
    sample = cut.sample(most=20)
    assert len(np.unique(sample.units[sample.members])) == 20
    assert len(np.unique(sample.units[~sample.members])) == 20
    (_, once), (_, again) = sample.sides[0], cut.sample(most=20).sides[0]
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(np.unique(once), np.arange(len(once)))


def test_rows_of_another_corpus_are_refused(tmp_path):
    cut = Cut(tmp_path, PrivacyUnit.PATIENT)
    altered = np.array(cut.train.tokens)
    altered[0, 1] += 1
    object.__setattr__(cut.train, "tokens", altered)
    with pytest.raises(BadInput, match="differ from the corpus") as error:
        cut.sample()
    assert "p0" not in str(error.value)


def test_a_group_of_several_units_is_measured_where_it_lies_on_one_side(tmp_path):
    cut = Cut(tmp_path, PrivacyUnit.DOCUMENT)
    sample = cut.sample()
    scored, most = sample.scored("patient", by_group(sample))
    of_patient: dict[str, list[bool]] = {}
    for unit in units_of(documents(), cut.unit, 4):
        of_patient.setdefault(unit.documents[0].patient_id, []).append(cut.held_out[unit.unit_id])
    pure = Counter((len(s), s[0]) for s in of_patient.values() if len(set(s)) == 1)
    matched = {size: min(pure[size, True], pure[size, False]) for size, _ in pure}
    assert most == max(size for size, count in matched.items() if count)
    assert scored.members.sum() == (~scored.members).sum() == sum(matched.values())
    ids, places = sample.groups["patient"], by_group(sample).scores
    of_one_side = [
        float(places[ids == group].mean())
        for group in np.unique(ids)
        if len(np.unique(sample.members[ids == group])) == 1
    ]
    assert all(np.isclose(score, of_one_side).any() for score in scored.scores)


def test_a_group_within_a_unit_is_its_rows_mean(tmp_path):
    sample = Cut(tmp_path, PrivacyUnit.PATIENT).sample()
    attack = by_group(sample)
    scored, most = sample.scored("document", attack)
    ids = sample.groups["document"]
    expected = [attack.scores[ids == group].mean() for group in np.unique(ids)]
    assert scored.scores.tolist() == pytest.approx(expected)
    assert most == 1
    few = Attack("few", attack.scores, 0.0, np.arange(len(ids)) < 5)
    assert sample.scored("document", few) is None
