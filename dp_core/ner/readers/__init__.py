"""Reading sentences with entity labels from the forms in which people have them."""

from dp_core.ner.readers.read import read_sentences

__all__ = ["read_sentences"]
