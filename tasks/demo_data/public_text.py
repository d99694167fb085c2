"""Synthetic public text on travel, sport, history and other topics (`tables/public_topics.txt`).

The text is general English with almost no clinical words. A model that is pre-trained on it learns
the grammar of sentences, but not the content of clinical notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from dp_core.data.corpus import Document
from dp_core.data.hashing import generator, seed_key
from tasks.demo_data.templates import Span, phrase, pick, read_table

_SHARED, *_TOPICS = read_table("public_topics")
_SENTENCES = (6, 12)  # fewest and most in a document
_JOINTS = ("", "", "", "", "However, ", "Later, ", "Today, ", "Indeed, ", "In those years ")


def public_text(documents: int, seed: int) -> Iterator[Document]:
    """Yield articles, each on one subject.

    Args:
        documents: number of articles, each of about 70 to 250 words.
        seed: public seed; a larger corpus begins with the articles of a smaller corpus.
    """
    key = seed_key(seed)
    for index in range(documents):
        rng = generator(key, "public corpus", str(index))
        yield Document(f"W{index:06d}", "", _article(rng))


def _article(rng: Random) -> str:
    topic = _TOPICS[int(rng.random() * len(_TOPICS))]
    # An article uses few names, so that names recur as in real articles.
    known = {name: rng.sample(words, min(len(words), 5)) for name, words in topic.fields.items()}

    def fill(name: str) -> list[Span]:
        return [(pick(rng, known.get(name) or _SHARED.fields[name]), "")]

    sentences = []
    for _ in range(rng.randint(*_SENTENCES)):
        text = phrase(pick(rng, topic.templates), rng, fill)
        joint = pick(rng, _JOINTS)
        sentences.append(joint + text if joint else text[0].upper() + text[1:])
    return ". ".join(sentences) + "."
