"""Text of the project's own making: clinical notes, sentences with entities, public articles."""

from dp_core.corpus.synthetic.labelled import labelled_sentences
from dp_core.corpus.synthetic.notes import notes
from dp_core.corpus.synthetic.public import public_text

__all__ = ["labelled_sentences", "notes", "public_text"]
