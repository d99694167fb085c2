"""Synthetic texts with a class, and pairs of texts, from the sentences of `entities.py`.

The class of a text is the type of its first entity. A pair consists of a sentence and a claim about
its entities. As in natural language inference, the sentence implies the claim (entailment),
contradicts it (contradiction), or does neither (neutral).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dp_core.data.hashing import generator, seed_key
from dp_core.data.labelled_text import LabelledText
from dp_core.data.ner import Sentence
from tasks.demo_data.entities import labelled_sentences, surfaces

NO_ENTITY = "none"  # the class of a text without entities
_RELATIONS = ("entailment", "contradiction", "neutral")


def labelled_texts(seed: int) -> tuple[list[LabelledText], list[LabelledText]]:
    """Return training and test texts with their classes, about different patients.

    Args:
        seed: public seed.
    """
    train, test = labelled_sentences(seed=seed)
    return [_text(s) for s in train], [_text(s) for s in test]


def labelled_pairs(seed: int) -> tuple[list[LabelledText], list[LabelledText]]:
    """Return training and test pairs with their relations, about different patients.

    Args:
        seed: public seed.
    """
    train, test = labelled_sentences(seed=seed)
    return list(_pairs(train, seed)), list(_pairs(test, seed))


def _text(sentence: Sentence) -> LabelledText:
    first = next((tag[2:] for tag in sentence.tags if tag != "O"), NO_ENTITY)
    return LabelledText(" ".join(sentence.tokens), "", first, sentence.document_id)


def _pairs(sentences: Sequence[Sentence], seed: int) -> Iterator[LabelledText]:
    mentioned = [(s, words) for s in sentences if (words := surfaces(s))]
    surfaces_of_all = sorted({word for _, words in mentioned for word in words})
    for number, (sentence, words) in enumerate(mentioned):
        rng = generator(seed_key(seed), "pairs", str(number))
        relation = _RELATIONS[int(rng.random() * len(_RELATIONS))]
        about = words if relation != "neutral" else [w for w in surfaces_of_all if w not in words]
        entity = about[int(rng.random() * len(about))]
        denied = relation == "contradiction" or (relation == "neutral" and rng.random() < 0.5)
        claim = f"no mention of {entity}" if denied else f"mention of {entity}"
        yield LabelledText(" ".join(sentence.tokens), claim, relation, sentence.document_id)
