"""Subjects of the made-up public text (`tables/public_topics.txt`): travel, sport, history, …

General English with hardly a clinical word: a model pre-trained on it knows how sentences go on,
but not what a note talks about. In the table `= name` starts a subject, `- …` is a sentence
template, and `slot: a, b, c` is what fills a slot; `shared` slots belong to every subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Topic:
    """Sentence templates, and what fills their slots."""

    sentences: tuple[str, ...]
    words: dict[str, tuple[str, ...]]


def _topic(block: str) -> tuple[str, Topic]:
    title, *lines = block.strip().splitlines()
    sentences = tuple(line[2:] for line in lines if line.startswith("- "))
    pairs = [line.partition(": ") for line in lines if not line.startswith("- ")]
    words = {slot: tuple(word.strip() for word in items.split(",")) for slot, _, items in pairs}
    return title.removeprefix("= "), Topic(sentences, words)


_TABLE = (Path(__file__).parent / "tables" / "public_topics.txt").read_text(encoding="utf-8")
_ALL = dict(_topic(block) for block in _TABLE.strip().split("\n\n"))

SHARED = _ALL["shared"].words
TOPICS: tuple[Topic, ...] = tuple(topic for name, topic in _ALL.items() if name != "shared")
