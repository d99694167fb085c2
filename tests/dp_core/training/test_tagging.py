import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from dp_core.data.labelled_text import Sentence, joined, score
from dp_core.data.tokens import bert_segmentation
from dp_core.nn import best_tags, chain_losses
from dp_core.training.finetune import store_by_unit
from dp_core.training.heads import TaggingHead, windows
from dp_core.vocabulary import subwords
from dp_core.vocabulary.subwords import learn
from dp_core.vocabulary.tokenizer_files import GPT2

LABELS = ("O", "B-drug", "I-drug")
HEAD = TaggingHead(LABELS)


@pytest.fixture(scope="module")
def tokenizer():
    return subwords.learn({"pain": 50, "aspirin": 40, "a": 5, "b": 5}, 60)


def sentence(words, tags=None):
    return Sentence(tuple(words), tuple(["O"] * len(words) if tags is None else tags))


def tags_of(texts, rows, at_words, transitions=None):
    """Return the tags of texts by the logits of each word; other pieces have other logits."""
    logits = [np.tile(np.float32([0, 5, 9]), (len(row.ids), 1)) for row in rows]
    for row, of_pieces, of_words in zip(rows, logits, at_words, strict=True):
        of_pieces[list(row.positions)] = of_words
    return HEAD.decoded(texts, rows, logits, transitions)


def echo(rows):
    """Answer each row with its labels as logits."""
    return [np.eye(len(LABELS))[list(row.labels)] for row in rows]


def test_labels_are_at_the_first_pieces_of_words(tokenizer):
    s = sentence(["pain", "aspirinaspirin", "b"], ["O", "B-drug", "I-drug"])
    (row,) = HEAD.rows([s], tokenizer, 32)
    pieces = [tokenizer.id_to_token(i) for i in row.ids]
    assert (pieces[0], pieces[-1]) == ("[CLS]", "[SEP]")
    assert [pieces[f][0] for f in row.positions] == ["p", "a", "b"]
    assert all(not pieces[f].startswith("##") for f in row.positions)
    assert row.labels == (0, 1, 2)


SPACED = GPT2.pre_tokenizer.replace('"add_prefix_space":false', '"add_prefix_space":true')
GERMAN = ("Übelkeit", "und", "Fußödeme", ",", "kein", "Fieber")


@pytest.mark.parametrize(
    "words", [bert_segmentation(False, False), GPT2, replace(GPT2, pre_tokenizer=SPACED)]
)
def test_words_are_read_as_in_running_text_and_labelled_at_their_offsets(words):
    text = " ".join(GERMAN)
    tokenizer = learn(dict.fromkeys(words.split(text * 2), 5), 330, (), words)
    s = sentence(GERMAN, ["B-drug", "O", "B-drug", "O", "O", "I-drug"])
    (row,) = HEAD.rows([s], tokenizer, 64)
    encoding = tokenizer.encode(text)
    assert list(row.ids) == encoding.ids
    ends = [len(" ".join(GERMAN[: i + 1])) for i in range(len(GERMAN))]
    owner = [sum(end >= b for end in ends) for _, b in encoding.offsets[1:-1]]  # words not ended
    firsts = [1 + owner.index(number) for number in range(len(GERMAN), 0, -1)]
    assert list(row.positions) == firsts
    assert row.labels == (1, 0, 1, 0, 0, 2)
    assert tags_of([s], [row], echo([row])) == [s.tags]


def test_unknown_tag_and_word_without_pieces_are_outside(tokenizer):
    s = sentence(["\u200b", "pain", "pain"], ["B-drug", "B-drug", "B-other"])
    rows = HEAD.rows([s], tokenizer, 32)
    assert [row.labels for row in rows] == [(1, 0)]
    assert tags_of([s], rows, echo(rows)) == [("O", "B-drug", "O")]


def context(sizes, window, word):
    """Return the smaller number of pieces before and after a word; text ends do not limit it."""
    before = sum(sizes[window[0] : word]) if window[0] else math.inf
    behind = sum(sizes[word + 1 : window[1]]) if window[1] < len(sizes) else math.inf
    return min(before, behind)


@given(
    st.lists(st.integers(1, 5), min_size=0, max_size=60),
    st.integers(5, 14),
    st.sampled_from([0.0, 0.25, 0.5, 0.9]),
)
def test_each_word_is_tagged_once_in_the_window_with_most_context(sizes, room, overlap):
    all_windows = windows(sizes, room, overlap)
    asked = [word for w in all_windows for word in range(w.first, w.last)]
    assert asked == list(range(len(sizes)))
    extents = [(w.begin, w.end) for w in all_windows]
    for w in all_windows:
        assert w.begin <= w.first < w.last <= w.end
        assert sum(sizes[w.begin : w.end]) <= room
        for word in range(w.first, w.last):
            every = [context(sizes, e, word) for e in extents if e[0] <= word < e[1]]
            shown = context(sizes, (w.begin, w.end), word)
            assert shown == max(every)
    if len(extents) > 1:  # the last window has no room left
        assert sum(sizes[extents[-1][0] - 1 :]) > room
    for (_, end), (begin, last) in itertools.pairwise(extents):
        assert begin <= end < last
        if last < len(sizes):  # the last window is extended to the left
            assert sum(sizes[begin:end]) <= overlap * room


@pytest.mark.parametrize("max_length", [4, 7, 16, 64])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.9])
def test_word_in_several_windows_is_learned_and_scored_once(tokenizer, max_length, overlap):
    rng = np.random.default_rng(1)
    words = ["pain", "aspirin", "aabbaabb", "b"]
    texts = [sentence(rng.choice(words, n), rng.choice(LABELS, n)) for n in (1, 5, 90, 2)]
    head = TaggingHead(LABELS, overlap=overlap)
    rows = head.rows(texts, tokenizer, max_length)
    assert max(len(r.ids) for r in rows) <= max_length
    learned = [[w for row in rows if row.item == i for w in row.words] for i in range(len(texts))]
    assert learned == [list(range(len(s.tokens))) for s in texts]
    store, _ = store_by_unit(
        rows, ["a"] * 4, max_length=max_length, vocabulary=tokenizer.get_vocab_size(), pad=0
    )
    examples = head.objective(rows, max_length).examples
    made = examples(store, np.arange(len(rows)), np.zeros(len(rows), np.uint64))
    assert made.weights.sum() == 98
    assert tags_of(texts, rows, echo(rows)) == [s.tags for s in texts]


def test_f1_does_not_depend_on_where_a_document_was_cut_into_sentences(tokenizer):
    """A tagger that reads three words on each side, in windows that show at least as many."""
    rng = np.random.default_rng(2)
    words = tuple(rng.choice(["pain", "aspirin", "b"], 120))

    def guess(row):
        pieces = [tokenizer.id_to_token(i) for i in row.ids]
        near = ["".join(pieces[max(0, f - 3) : f + 4]) for f in row.positions]
        return np.array([[p.count("pain"), p.count("a"), p.count("b")] for p in near], np.float32)

    # Entities are single words, so that no cut divides them.
    tags, scores = tuple(rng.choice(["O", "B-drug"], 120)), set()
    for cuts in ([0, 120], [0, 7, 50, 120], [0, 60, 61, 62, 120]):
        parts = [Sentence(words[a:b], tags[a:b], "note") for a, b in itertools.pairwise(cuts)]
        (joined_up,) = joined(parts)
        rows = HEAD.rows([joined_up], tokenizer, 40)
        (predicted,) = tags_of([joined_up], rows, [guess(row) for row in rows])
        scores.add(score([joined_up], [predicted]).micro)
    (only,) = scores
    assert only.expected > 5


def test_crf_tags_well_formed_sequences_over_all_windows_of_a_sentence(tokenizer):
    long = sentence(["pain"] * 40)
    rows = HEAD.rows([long], tokenizer, 16)
    logits = [np.tile(np.array([0, 1, 2], np.float32), (len(r.words), 1)) for r in rows]
    (alone,) = tags_of([long], rows, logits)
    assert alone == ("I-drug",) * 40  # not well formed, because an entity begins with B
    transitions = np.zeros((3, 3), np.float32)
    (together,) = tags_of([long], rows, logits, transitions)
    assert together == ("B-drug", *("I-drug",) * 39)


TAGS = 3


def path_score(emissions: np.ndarray, transitions: np.ndarray, path: tuple[int, ...]) -> float:
    words = sum(emissions[k, tag] for k, tag in enumerate(path))
    return float(words + sum(transitions[a, b] for a, b in itertools.pairwise(path)))


def chain(words: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (words, TAGS), (TAGS, TAGS)
    emissions, transitions = (rng.normal(0, 2, s).astype(np.float32) for s in shapes)
    return emissions, transitions


@pytest.mark.parametrize("words", [1, 2, 5])
def test_loss_equals_enumeration_of_all_paths(words):
    emissions, transitions = chain(words, words)
    paths = list(itertools.product(range(TAGS), repeat=words))
    scores = np.array([path_score(emissions, transitions, path) for path in paths])
    log_z = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
    room = 6  # padding after the chain, which must have no effect
    shown = np.full((len(paths), room, TAGS), 7.0, np.float32)
    shown[:, :words] = emissions
    tags, weights = np.ones((len(paths), room), np.int32), np.zeros((len(paths), room), np.float32)
    tags[:, :words], weights[:, :words] = paths, 1
    copies = np.tile(transitions, (len(paths), 1, 1))
    losses = chain_losses(*(tf.constant(a) for a in (shown, copies, tags, weights))).numpy()
    np.testing.assert_allclose(losses, log_z - scores, rtol=1e-4, atol=1e-4)
    assert np.exp(-losses.astype(np.float64)).sum() == pytest.approx(1, abs=1e-4)
    none = np.zeros_like(weights)
    empty = chain_losses(*(tf.constant(a) for a in (shown, copies, tags, none))).numpy()
    assert (empty == 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_best_tags_equal_enumeration_of_allowed_paths(seed):
    rng = np.random.default_rng(seed)
    words = int(rng.integers(1, 6))
    emissions, transitions = chain(words, seed)
    begins, follows = np.array([True, True, False]), rng.random((TAGS, TAGS)) < 0.6
    follows[0, 0] = True  # some path is always allowed
    allowed = [
        path
        for path in itertools.product(range(TAGS), repeat=words)
        if begins[path[0]] and all(follows[a, b] for a, b in itertools.pairwise(path))
    ]
    best = max(allowed, key=lambda path: path_score(emissions, transitions, path))
    assert tuple(best_tags(emissions, transitions, begins, follows)) == best
