"""Text drawn from a back-off n-gram model of released phrases (Katz 1987), among public text.

Everything here is post-processing: it reads released counts, public documents and a public seed,
and nothing else. A model that learns from phrases alone forgets what public text taught it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random

from dp_core.data.corpus import Document
from dp_core.data.hashing import generator, seed_key
from dp_core.errors import BadInput
from dp_core.phrases.ngram_release import Counts

WRITTEN = "written-"  # how the ids of written documents begin
_LEAST_BACK_OFF = 0.02  # so that no loop of phrases is all that is written


class BackOffModel:
    """The next word after the longest known context, by released counts (Katz 1987).

    A context of n − 1 words is known if it begins a released phrase of n words. It is left for a
    shorter one with the chance that its counts do not explain: of c(h) units that hold a context h,
    the share 1 − Σ_w c(h w) / c(h) went on with a word that was not released after it. Where h is
    no released phrase itself, the rarest of its longest released parts bounds c(h). Where no
    context is left, a new phrase begins; a phrase of one word is a word by itself.

    Args:
        phrases: length -> released phrases and their noised counts.

    Raises:
        BadInput: no phrase of two words or more was released.
    """

    def __init__(self, phrases: Mapping[int, Counts]) -> None:
        counts = {phrase: count for found in phrases.values() for phrase, count in found.items()}
        if not any(found for length, found in phrases.items() if length > 1):
            raise BadInput(
                "no phrase was released: there is nothing to write",
                where="phrases",
                fix="Raise phrases_epsilon, or set it to 0.",
            )
        self._starts = _Weighted(counts)
        lengths = sorted(phrases, reverse=True)
        self._contexts = {  # the longest first
            length - 1: {
                context: (after, _missing_share(context, after.total, counts, lengths))
                for context, after in _continuations(phrases[length]).items()
            }
            for length in lengths
            if length > 1
        }

    def write(self, words: int, coins: Random) -> list[str]:
        """Return a text of so many words."""
        text: list[str] = []
        while len(text) < words:
            text += self._next(text, coins) or self._starts.draw(coins).split(" ")
        return text[:words]

    def _next(self, text: list[str], coins: Random) -> list[str]:
        for size, contexts in self._contexts.items():
            known = contexts.get(tuple(text[-size:]))  # of fewer words: of no context of this size
            if known and coins.random() >= known[1]:
                return [known[0].draw(coins)]
        return []


def _continuations(phrases: Counts) -> dict[tuple[str, ...], _Weighted]:
    """Return what follows on all but the last word of each phrase."""
    following: dict[tuple[str, ...], dict[str, int]] = {}
    for phrase, count in phrases.items():
        *context, last = phrase.split(" ")
        following.setdefault(tuple(context), {})[last] = count
    return {context: _Weighted(after) for context, after in following.items()}


def _missing_share(
    context: tuple[str, ...], explained: int, counts: Counts, lengths: Sequence[int]
) -> float:
    """Return the share of a context's units that the counts of what follows do not explain.

    A unit counts once for every word that it has after the context, so they may explain more than
    all.
    """
    for length in lengths:
        parts = [" ".join(context[i : i + length]) for i in range(len(context) - length + 1)]
        if parts and all(part in counts for part in parts):
            held = max(1, min(counts[part] for part in parts))
            return max(_LEAST_BACK_OFF, 1 - explained / held)
    return _LEAST_BACK_OFF


class _Weighted:
    """Items drawn in proportion to their counts; in one order, whatever the order of the dict."""

    def __init__(self, counts: Counts) -> None:
        self._items = sorted(counts)
        self._sums = list(itertools.accumulate(max(1, counts[item]) for item in self._items))
        self.total = self._sums[-1]

    def draw(self, coins: Random) -> str:
        return coins.choices(self._items, cum_weights=self._sums)[0]


def write_documents(
    phrases: Mapping[int, Counts], documents: int, words: int, seed: int
) -> Iterator[Document]:
    """Yield documents of so many words each, with public coins.

    Args:
        phrases: length -> released phrases and their noised counts; of length 1, released words.
        documents: how many. words: of each. seed: public.

    Raises:
        BadInput: nothing was released.
    """
    model = BackOffModel(phrases)
    for number in range(documents):
        coins = generator(seed_key(seed), "written text", str(number))
        yield Document(f"{WRITTEN}{number}", "", " ".join(model.write(words, coins)))


def draw_public_documents(
    public: Callable[[], Iterable[Document]], words: float, seed: int
) -> Iterator[Document]:
    """Yield public documents of about so many words together, each as often as the others.

    Where they hold fewer words, each comes several times; the rest is drawn with public coins. They
    are read twice and never held.

    Args:
        public: opens them. words: wanted, of all together. seed: public.

    Raises:
        BadInput: there is no public word.
    """
    held = sum(len(document.text.split()) for document in public())
    if not held:
        raise BadInput("the public text is empty", where="public_corpus_uri")
    coins = generator(seed_key(seed), "public text among written text")
    whole, part = divmod(words / held, 1)
    for number, document in enumerate(public()):
        for copy in range(int(whole) + (coins.random() < part)):
            yield Document(f"public-{number}-{copy}", "", document.text)
