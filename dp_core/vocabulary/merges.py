"""Byte-pair merges from counts (Sennrich et al. 2016), exactly those of `tokenizers`' trainer.

That trainer reads text, so that counts had to be written out word by word, and scaled down. Here
the counts themselves are read, whatever their size, and nothing is rounded: the merges are those
that `tokenizers.trainers.BpeTrainer` (and `WordPieceTrainer`, which is the same with a prefix)
finds on a text in which every word stands as often as its count. A test holds the two equal, with
ties. Words that are to be tokens whole need no merges: they are set apart first
(`whole_words_apart`), and the rest is learned from.

What decides, in the trainer's own order: the pair with the highest count; among equals the one
whose left token has the smaller id, then the right one. A pair's count is kept as the trainer keeps
it: pairs that overlap themselves (`aaa`) count as often as they stand there, and a token that two
different pairs spell is one token.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

Pair = tuple[int, int]
WHOLE = 0.75  # most of the learned tokens that words set apart take: docs/vocabulary.md


def learn_merges(
    words: Mapping[str, int], tokens: Sequence[str], size: int, *, prefix: str = ""
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens, and the merges in the order in which they were learned.

    Args:
        words: how often each word counts, 1 or more.
        tokens: what there is to begin with, in order of id: special tokens and the alphabet.
            Characters that are not among them are left out of the words, as the trainer does.
        size: at most this many tokens in the end.
        prefix: what the tokens of a word begin with, other than its first (WordPiece's `##`).

    Returns:
        `tokens` and the new ones, at most `size` of them unless there were more to begin with; and
        the pair of tokens behind each merge.
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
    # The least of a heap is the pair to merge. The running number keeps sets from being compared.
    queue = [(-pair_counts[p], p, i, where) for i, (p, where) in enumerate(places.items())]
    heapq.heapify(queue)
    merges: list[tuple[str, str]] = []
    running = len(queue)
    while queue and len(known) < size:
        negative, pair, number, where = heapq.heappop(queue)
        if -negative != pair_counts[pair]:  # it fell since it was put there
            if pair_counts[pair] > 0:
                heapq.heappush(queue, (-pair_counts[pair], pair, number, where))
            continue
        left, right = known[pair[0]], known[pair[1]]
        token = left + right.removeprefix(prefix)
        new = ids.setdefault(token, len(known))
        if new == len(known):
            known.append(token)
        merges.append((left, right))
        found: defaultdict[Pair, set[int]] = defaultdict(set)
        for word in where:
            _merge(spelt[word], pair, new, counts[word], pair_counts, found, word)
        for changed, words_with_it in found.items():
            if pair_counts[changed] > 0:
                heapq.heappush(queue, (-pair_counts[changed], changed, running, words_with_it))
                running += 1
    return known, merges


def whole_words_apart(
    words: Mapping[str, int], tokens: Sequence[str], size: int, whole: Sequence[str]
) -> tuple[dict[str, int], list[str]]:
    """Give the first of `whole` tokens of their own; return what merges are then learned from.

    A word that is learned by merges takes tokens for its beginnings as well, which nothing else may
    need; set apart, it takes one, and merges serve the words that have none.

    Args:
        words: how often each word counts.
        tokens: the special tokens and the alphabet.
        size: of the vocabulary; of what `tokens` leave of it, `WHOLE` is for these words at most.
        whole: words, the most wanted first, each once.

    Returns:
        `words` without those set apart, and `tokens` with them.
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
    found: defaultdict[Pair, set[int]],
    word: int,
) -> None:
    """Replace a pair by a token within one word, from left to right, and count its new neighbours.

    Args:
        symbols: of the word; changed here.
        pair: what is merged.
        new: the token's id.
        count: of the word.
        pair_counts: changed here.
        found: pair -> words in which it has newly come to stand; changed here.
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
                found[before, new].add(word)
            if i < len(symbols) - 1:
                after = symbols[i + 1]
                pair_counts[second, after] -= count
                pair_counts[new, after] += count
                found[new, after].add(word)
        i += 1
