"""Synthetic labelled text from patients who are not in the private corpus.

*Sentences with entities.* A fixed eighth of the entity surfaces, chosen by hash, is kept out of the
training part. The test part therefore contains names and combinations that no training sentence
contains.

*Texts with a class, and pairs.* The class of a text is the type of its first entity. A pair
consists of a sentence and a claim about its entities. As in natural language inference, the
sentence implies the claim (entailment), contradicts it (contradiction), or does neither (neutral).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from dp_core.data.hashing import coin, generator, seed_key
from dp_core.data.labelled_text import LabelledText, Sentence, entities
from tasks.demo_data.notes import NoteLine, labelled_notes

_HELD_OUT_SURFACES = 1 / 8
_KEEP_UNLABELLED = 0.3  # of the sentences without an entity
_TOKEN = re.compile(r"\d+(?:[./:-]\d+)+|\w+(?:['/]\w+)*|[^\w\s]")
_ENOUGH_PATIENTS = 1 << 40


def labelled_sentences(n: int = 3000, seed: int = 1) -> tuple[list[Sentence], list[Sentence]]:
    """Return training and test sentences about different patients, in the ratio 15 to 4.

    Args:
        n: number of training sentences.
        seed: public seed; the sentences share no patient with `notes(…, seed)`.
    """
    held_out = _sentences(seed, "entities, test")
    training = (s for s in _sentences(seed, "entities, training") if not _has_held_out(s, seed))
    return list(islice(training, n)), list(islice(held_out, -(-n * 4 // 15)))


def _sentences(seed: int, stream: str) -> Iterator[Sentence]:
    rng = generator(seed_key(seed), stream, "which sentences")
    for note in labelled_notes(_ENOUGH_PATIENTS, seed, stream):
        for line in note.lines:
            labelled = any(label for _, label in line.spans)
            if not line.heading and (labelled or rng.random() < _KEEP_UNLABELLED):
                yield tokenised(line, note.document.document_id)


def tokenised(line: NoteLine, document_id: str) -> Sentence:
    """Return a line's tokens and IOB2 tags; a number with separators is one token (`120/80`)."""
    tokens: list[str] = []
    tags: list[str] = []
    for text, label in line.spans:
        words = _TOKEN.findall(text)
        tokens += words
        tags += [f"{'I' if i else 'B'}-{label}" if label else "O" for i in range(len(words))]
    return Sentence(tuple(tokens), tuple(tags), document_id)


def _has_held_out(sentence: Sentence, seed: int) -> bool:
    key = seed_key(seed)
    return any(coin(key, "surface", s) < _HELD_OUT_SURFACES for s in surfaces(sentence))


def surfaces(sentence: Sentence) -> list[str]:
    """Return the entities of a sentence as lower-case text."""
    extents = entities(sentence.tags)
    return [" ".join(sentence.tokens[a:b]).lower() for _, a, b in extents]


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
