"""Synthetic text: clinical notes, sentences with entities, public articles."""

from tasks.demo_data.entities import labelled_sentences
from tasks.demo_data.notes import notes
from tasks.demo_data.public_text import public_text

__all__ = ["labelled_sentences", "notes", "public_text"]
