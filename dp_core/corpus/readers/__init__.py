"""Reading a corpus from the forms in which people have it."""

from dp_core.corpus.readers.jsonl import JsonlFields
from dp_core.corpus.readers.quarantine import Quarantine, Reason
from dp_core.corpus.readers.read import read_corpus

__all__ = ["JsonlFields", "Quarantine", "Reason", "read_corpus"]
