"""Subjects of the made-up public text (`tables/public_topics.txt`): travel, sport, history, …

General English with hardly a clinical word: a model pre-trained on it knows how sentences go on,
but not what a note talks about.
"""

from __future__ import annotations

from dp_core.corpus.synthetic.tables import Block, read_table

_ALL = read_table("public_topics")

SHARED: dict[str, tuple[str, ...]] = next(b.fields for b in _ALL if b.title == "shared")
TOPICS: tuple[Block, ...] = tuple(b for b in _ALL if b.title != "shared")
