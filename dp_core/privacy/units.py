"""What is protected: the privacy unit. Neighbouring data sets differ by one whole unit."""

from __future__ import annotations

from enum import StrEnum


class PrivacyUnit(StrEnum):
    """The unit that is added or removed between neighbouring data sets."""

    EXAMPLE = "example"  # one N-word tuple, as in Hoory et al. 2021
    DOCUMENT = "document"
    PATIENT = "patient"
