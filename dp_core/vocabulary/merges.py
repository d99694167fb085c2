"""Byte-pair merges from counts (Sennrich et al. 2016), equal to the merges of `tokenizers`.

The trainers of `tokenizers` read text, so counts would have to be scaled down and written out word
by word. This module reads counts of any size without rounding. Its merges equal the result of
`tokenizers.trainers.BpeTrainer` (and of `WordPieceTrainer`, which only adds a prefix) on a text
in which every word occurs as often as its count. A test compares the two, including ties. Words
that become whole tokens need no merges: `whole_words_apart` removes them before the rest is
learned.

The order of merges is the trainer's: the pair with the highest count; among equals the pair whose
left token has the smaller id, then the right one. Counts are also maintained as in the trainer:
pairs that overlap themselves (`aaa`) count once per position, and a token that two different pairs
spell is one token.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from dp_core.data.tokens import Segmentation
from dp_core.errors import BadInput

Pair = tuple[int, int]
WHOLE = 0.75  # largest share of the learned tokens that whole words take: docs/vocabulary.md


def learn_merges(
    words: Mapping[str, int], tokens: Sequence[str], size: int, *, prefix: str = ""
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens, and the merges in the order in which they were learned.

    Args:
        words: count of each word, 1 or more.
        tokens: the initial tokens in order of id: special tokens and the alphabet. Other
            characters are left out of the words, as in the trainer.
        size: at most this many tokens in the end.
        prefix: prefix of a word's tokens except its first one (WordPiece's `##`).

    Returns:
        `tokens` and the new ones, at most `size` in total unless `tokens` has more; and the pair of
        tokens of each merge.
    """
    known = list(tokens)
    ids = {token: i for i, token in enumerate(known)}
    spelt, counts = _spelt(words, ids, prefix)
    pair_counts: defaultdict[Pair, int] = defaultdict(int)
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for number, symbols in enumerate(spelt):
        for pair in itertools.pairwise(symbols):
            pair_counts[pair] += counts[number]
            places[pair].add(number)
    # The heap's least element is the pair to merge. The running number avoids comparing sets.
    queue = [(-pair_counts[p], p, i, where) for i, (p, where) in enumerate(places.items())]
    heapq.heapify(queue)
    merges: list[tuple[str, str]] = []
    running = len(queue)
    while queue and len(known) < size:
        negative, pair, number, where = heapq.heappop(queue)
        if -negative != pair_counts[pair]:  # the count has decreased since it was pushed
            if pair_counts[pair] > 0:
                heapq.heappush(queue, (-pair_counts[pair], pair, number, where))
            continue
        left, right = known[pair[0]], known[pair[1]]
        token = left + right.removeprefix(prefix)
        new = ids.setdefault(token, len(known))
        if new == len(known):
            known.append(token)
        merges.append((left, right))
        new_pairs: defaultdict[Pair, set[int]] = defaultdict(set)
        for word in where:
            _merge(spelt[word], pair, new, counts[word], pair_counts, new_pairs, word)
        for changed, words_with_it in new_pairs.items():
            if pair_counts[changed] > 0:
                heapq.heappush(queue, (-pair_counts[changed], changed, running, words_with_it))
                running += 1
    return known, merges


def learn_tokens(
    counts: Mapping[str, int],
    base: Sequence[str],
    size: int,
    whole: Sequence[str],
    *,
    prefix: str = "",
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens and merges of a vocabulary, of which some are whole words.

    The room that whole words and the merges of all other words leave is for parts of all words,
    which spell unknown words.

    Args:
        counts: count of each word.
        base: the special tokens and the alphabet.
        size: at most this many tokens.
        whole: distinct words, of which the first become single tokens (`whole_words_apart`).
        prefix: as in `learn_merges`.
    """
    rest, base = whole_words_apart(counts, base, size, whole)
    tokens, merges = learn_merges(rest, base, size, prefix=prefix)
    if whole:
        tokens, more = learn_merges(counts, tokens, size, prefix=prefix)
        merges = list(dict.fromkeys((*merges, *more)))
    return tokens, merges


def words_to_learn(counts: Mapping[str, int], words: Segmentation) -> dict[str, int]:
    """Return the counts without placeholders, which are tokens already.

    Raises:
        BadInput: there is no word.
    """
    if not counts:
        raise BadInput(
            "no word passed the threshold",
            where="vocabulary",
            fix="Raise ε, δ or the number of units, lower words_per_unit, or use public text too.",
        )
    return {word: count for word, count in counts.items() if word not in words.placeholders}


def whole_words_apart(
    words: Mapping[str, int], tokens: Sequence[str], size: int, whole: Sequence[str]
) -> tuple[dict[str, int], list[str]]:
    """Make the first of `whole` single tokens, and return the input for learning merges.

    Merges that build a word also create tokens for its beginnings, which may be useless. A word
    that is set apart takes one token, and merges serve the words that are not tokens.

    Args:
        words: count of each word.
        tokens: the special tokens and the alphabet.
        size: size of the vocabulary; at most a share of `WHOLE` of the room after `tokens` is for
            whole words.
        whole: distinct words, the most wanted first.

    Returns:
        `words` without the words set apart, and `tokens` with them.
    """
    known = set(tokens)
    room = int(WHOLE * max(0, size - len(tokens)))
    apart = [word for word in whole if word not in known][:room]
    left = words.keys() - set(apart)
    return {w: count for w, count in words.items() if w in left}, [*tokens, *apart]


def _spelt(
    words: Mapping[str, int], ids: Mapping[str, int], prefix: str
) -> tuple[list[list[int]], list[int]]:
    """Return each word as ids of its characters, and the counts in the same order."""
    spelt, counts = [], []
    for word, count in words.items():
        symbols = [
            ids[prefix + character if i else character]
            for i, character in enumerate(word)
            if character in ids
        ]
        if len(symbols) > 1 and count > 0:
            spelt.append(symbols)
            counts.append(count)
    return spelt, counts


def _merge(
    symbols: list[int],
    pair: Pair,
    new: int,
    count: int,
    pair_counts: defaultdict[Pair, int],
    new_pairs: defaultdict[Pair, set[int]],
    word: int,
) -> None:
    """Replace a pair by a token within one word, from left to right, and count its new neighbours.

    Args:
        symbols: symbols of the word; changed in place.
        pair: the pair to merge.
        new: the token's id.
        count: count of the word.
        pair_counts: changed in place.
        new_pairs: pair -> words with a new occurrence of it; changed in place.
        word: the word's number.
    """
    first, second = pair
    i = 0
    while i < len(symbols) - 1:
        if symbols[i] == first and symbols[i + 1] == second:
            symbols[i : i + 2] = [new]
            if i > 0:
                before = symbols[i - 1]
                pair_counts[before, first] -= count
                pair_counts[before, new] += count
                new_pairs[before, new].add(word)
            if i < len(symbols) - 1:
                after = symbols[i + 1]
                pair_counts[second, after] -= count
                pair_counts[new, after] += count
                new_pairs[new, after].add(word)
        i += 1
