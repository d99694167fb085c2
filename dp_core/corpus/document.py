"""A document as every reader yields it, and as the normal form keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """One note, article or message.

    Args:
        document_id: names the document within its patient; texts that share it are one document.
        patient_id: names the person it is about; empty where the source does not say.
        text: the text itself, as read (not normalised).
        admission_id: names the hospital stay; empty where there is none.
    """

    document_id: str
    patient_id: str
    text: str
    admission_id: str = ""
