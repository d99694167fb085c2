"""A document as every reader yields it, and as the normal form keeps it; what makes ids equal."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
_EXACT = 2**53  # up to here a floating-point number stands for one integer alone


def normalised_id(value: object) -> str:
    """Return the one form of an id (of a patient, document, admission); empty where there is none.

    Every reader takes its ids through here, so that one patient is one privacy unit however a
    table or an export spelled it: without white space around it, in Unicode's normal form C
    (Unicode Standard Annex #15), and a whole number as an integer is written, since tables that
    were once read as floats say `7.0`. So `7`, `7.0`, "7", "7.0" and " 7 " are one id; "07" is
    another, for leading zeros can be part of a number on paper. Case is kept.

    Raises:
        ValueError: neither text nor a whole number, or one that a float cannot tell from others.
    """
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("not an id")
    text = unicodedata.normalize("NFC", str(value).strip())
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


@dataclass(frozen=True, slots=True)
class Document:
    """One note, article or message.

    Its ids are normalised (`normalised_id`), whoever makes it.

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

    def __post_init__(self) -> None:
        for name in ("document_id", "patient_id", "admission_id"):
            object.__setattr__(self, name, normalised_id(getattr(self, name)))
