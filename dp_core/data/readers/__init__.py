"""Reading a corpus from the forms in which people have it."""

from dp_core.data.readers.corpora import read_corpus
from dp_core.data.readers.jsonl import JsonlFields
from dp_core.data.readers.quarantine import Quarantine, Reason

__all__ = ["JsonlFields", "Quarantine", "Reason", "read_corpus"]
