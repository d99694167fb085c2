"""The conformance suite of `ShardMap`: the tests of each implementation inherit `MapConformance`.

Modules of these tests also import the fixtures `corpora` and `expected` from here.
"""

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from dp_core.audit.canaries import texts_with_canaries
from dp_core.cluster.shard_map import ProcessPool, ShardMap
from dp_core.data.corpus import Document, Shard, shards_of, write_corpus
from dp_core.data.token_store import PackedRows, ShardRows
from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary import subwords
from dp_core.vocabulary.item_sets import BoundedSets, GatheredSets, ItemSets
from dp_core.vocabulary.ngram_release import calibrate, release_phrases
from dp_core.vocabulary.selection_calibration import selection_plan
from dp_core.vocabulary.subwords import UnitWords, word_counts

SEED = PrivacySeed.fixed(3)
WORDS = [f"w{i}" for i in range(40)]
UNITS = UnitWords(PrivacyUnit.PATIENT, 1)


@dataclass(frozen=True)
class Squared:
    """Squares a number; fails at a given number, or kills its process."""

    wrong: int = -1
    deadly: int = -1
    here: int = 0  # the process that must survive

    def __call__(self, number: int) -> int:
        if number == self.deadly and os.getpid() != self.here:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.wrong <= number and self.wrong >= 0:
            raise BadInput(f"{number} is wrong", where="the number", fix="Take another one.")
        return number * number


def same(unit_id: str, rows: list[list[int]]) -> list[list[int]]:
    """No canaries."""
    return rows


def documents() -> Iterator[Document]:
    for i in range(240):
        words = [WORDS[(i * k + k * k) % len(WORDS)] for k in range(1, 20)]
        yield Document(str(i), f"p{i % 60}", "The common words. " + " ".join(words) + " Café")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Shard]]:
    by_count = {}
    for shards in (1, 2, 16):
        folder = tmp_path_factory.mktemp(f"in {shards} shards")
        write_corpus(documents(), folder, shards)
        by_count[shards] = shards_of(folder)
    return by_count


def released_words(
    place: ShardMap, shards: list[Shard], mechanism: str, folder: Path
) -> dict[str, int]:
    plan = selection_plan(mechanism, 4.0, 1e-3, 12, declared_units=100)  # type: ignore[arg-type]
    sets = BoundedSets(UNITS, 12, b"key", 100, frozenset({"the"}))
    with GatheredSets(folder / "gathered", limit=0) as gathered:
        gathered.extend(place.map(sets, shards))
        return plan.release(gathered, SEED, b"x")


def released_phrases(place: ShardMap, shards: list[Shard]) -> dict[int, dict[str, int]]:
    def gather(sets: BoundedSets) -> list[ItemSets]:
        return list(place.map(sets, shards))

    plan = calibrate(8.0, 1e-3, (2, 3), 6, declared_units=100)
    words = {"the", "common", "words", "."}
    read = partial(texts_with_canaries, PrivacyUnit.PATIENT, 1, 0.0, 0, ())
    return release_phrases(gather, read, plan, words, SEED, b"x")


def rows(place: ShardMap, shards: list[Shard]) -> list[list[bytes]]:
    tokenizer = subwords.learn(dict.fromkeys([*WORDS, "the", "common"], 9), 200).to_str()
    of_shard = ShardRows(PrivacyUnit.PATIENT, 1, tokenizer, 16, 3, b"k", 0.2, same, 4)
    cut = list(place.map(of_shard, shards))

    def joined(parts: list[PackedRows]) -> list[bytes]:
        columns = ("tokens", "lengths", "unit_keys")
        return [b"".join(getattr(part, name).tobytes() for part in parts) for name in columns]

    texts = list(itertools.chain.from_iterable(c.texts for c in cut))[:4]
    return [
        joined([c.train for c in cut]),
        joined([c.held_out for c in cut]),
        [repr(texts).encode(), str(sum(c.units for c in cut)).encode()],
    ]


class MapConformance:
    """The rules of every implementation; a subclass provides it."""

    kills_no_more_than_itself = True

    @pytest.fixture
    def place(self) -> ShardMap:
        raise NotImplementedError

    def test_values_are_returned_in_the_order_of_the_shards(self, place):
        for count in (0, 1, 2, 17):
            assert list(place.map(Squared(), range(count))) == [i * i for i in range(count)]

    def test_error_of_a_shard_is_raised_unchanged(self, place):
        values = place.map(Squared(wrong=3), range(12))
        with pytest.raises(BadInput) as caught:
            list(values)
        error = caught.value
        assert type(error) is BadInput
        assert (error.what, error.where, error.fix) == (
            "3 is wrong",
            "the number",
            "Take another one.",
        )
        assert str(error) == "the number: 3 is wrong. Take another one."

    def test_lost_worker_is_reported_as_one_error(self, place):
        if not self.kills_no_more_than_itself:
            pytest.skip("its function runs in this process")
        with pytest.raises(ConfideError) as caught:
            list(place.map(Squared(deadly=3, here=os.getpid()), range(12)))
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, BadInput)

    @pytest.mark.parametrize("mechanism", ["elimination", "gaussian"])
    def test_released_words_do_not_depend_on_number_of_shards(
        self, place, corpora, mechanism, expected, tmp_path
    ):
        for shards in corpora.values():
            assert released_words(place, shards, mechanism, tmp_path) == expected.words[mechanism]
        assert not list(tmp_path.iterdir())  # spilled files are removed

    def test_released_phrases_counts_and_rows_do_not_depend_on_number_of_shards(
        self, place, corpora, expected
    ):
        for shards in corpora.values():
            assert released_phrases(place, shards) == expected.phrases
            assert word_counts(place, shards, UNITS) == expected.counts
            assert rows(place, shards) == expected.rows


class Expected:
    """Results of one shard, by brute force where possible."""

    def __init__(self, folder: Path) -> None:
        write_corpus(documents(), folder / "corpus", 1)
        shards = shards_of(folder / "corpus")

        here = ProcessPool(1)
        mechanisms = ("elimination", "gaussian")
        self.words = {m: released_words(here, shards, m, folder / "spilled") for m in mechanisms}
        assert all(len(words) >= 3 and "the" not in words for words in self.words.values())
        self.phrases = released_phrases(here, shards)
        assert self.phrases[3]
        self.rows = rows(here, shards)
        assert all(self.rows[0]) and all(self.rows[1])
        self.counts: dict[str, int] = {}
        for patient in range(60):
            said = " ".join(d.text for d in documents() if d.patient_id == f"p{patient}")
            for word in set(said.lower().replace(".", " .").replace("é", "e").split()):
                self.counts[word] = self.counts.get(word, 0) + 1


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(tmp_path_factory.mktemp("one shard"))
