"""Text drawn from a back-off n-gram model of released phrases (Katz 1987), among public text.

Everything here is post-processing: it reads released counts, public documents and a public seed,
and nothing else. A model that learns from phrases alone forgets what public text taught it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random

from dp_core.data.corpus import Document
from dp_core.data.hashing import generator, seed_key
from dp_core.errors import BadInput
from dp_core.phrases.ngram_release import Counts

WRITTEN = "written-"  # how the ids of written documents begin
_BACK_OFF = 0.3  # chance to look at one word less of the context although the longer one is known


class BackOffModel:
    """The next word by the longest known context, weighted by released counts.

    A context of k words is known if a released phrase has it before its last word. With a small
    chance a shorter one is taken all the same: the longest phrases are the most common ones, and
    would otherwise be all that is written. Where no word of the context is known, a new phrase
    begins.

    Args:
        phrases: length -> released phrases and their noised counts.

    Raises:
        BadInput: nothing was released.
    """

    def __init__(self, phrases: Mapping[int, Counts]) -> None:
        following: dict[tuple[str, ...], dict[str, int]] = {}
        self._starts = _Weighted(
            {phrase: count for counts in phrases.values() for phrase, count in counts.items()}
        )
        if not self._starts:
            raise BadInput(
                "no phrase was released: there is nothing to write",
                where="phrases",
                fix="Raise phrases_epsilon, or set it to 0.",
            )
        for counts in phrases.values():
            for phrase, count in counts.items():
                *context, last = phrase.split(" ")
                for start in range(len(context)):
                    after = following.setdefault(tuple(context[start:]), {})
                    after[last] = after.get(last, 0) + count
        self._following = {context: _Weighted(after) for context, after in following.items()}
        self._longest = max(len(context) for context in following)

    def write(self, words: int, coins: Random) -> list[str]:
        """Return a text of so many words."""
        text: list[str] = []
        while len(text) < words:
            text += self._next(text, coins) or self._starts.draw(coins).split(" ")
        return text[:words]

    def _next(self, text: list[str], coins: Random) -> list[str]:
        for size in range(min(self._longest, len(text)), 0, -1):
            after = self._following.get(tuple(text[-size:]))
            if after and (size == 1 or coins.random() >= _BACK_OFF):
                return [after.draw(coins)]
        return []


class _Weighted:
    """Items drawn in proportion to their counts; in one order, whatever the order of the dict."""

    def __init__(self, counts: Counts) -> None:
        self._items = sorted(counts)
        self._sums = list(itertools.accumulate(max(1, counts[item]) for item in self._items))

    def __len__(self) -> int:
        return len(self._items)

    def draw(self, coins: Random) -> str:
        return coins.choices(self._items, cum_weights=self._sums)[0]


def write_documents(
    phrases: Mapping[int, Counts], documents: int, words: int, seed: int
) -> Iterator[Document]:
    """Yield documents of so many words each, with public coins.

    Args:
        phrases: length -> released phrases and their noised counts.
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
