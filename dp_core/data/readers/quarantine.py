"""Counts, reasons and locations of the items that a reader rejected, without their text."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from dp_core.config.data import TagScheme
from dp_core.errors import PrivateTextRefusal

_LOCATIONS_KEPT = 20  # per reason, so that a million bad lines do not fill the memory


class Reason(StrEnum):
    """The reason why an item was rejected."""

    EMPTY = "no text"
    ENCODING = "not UTF-8"
    TOO_LONG = "longer than any note"
    UNREADABLE = "unreadable or half-written"
    TOO_MUCH = "unpacks to far more than text does"
    TWICE = "two files of one name"
    NOT_JSON = "not a JSON object"
    WRONG_FIELD = "a field is missing or of the wrong type"
    WRONG_COLUMNS = "wrong number of columns, or broken quoting"
    NO_PATIENT = "no patient id"
    OFFSETS = "offsets do not fit the text"
    TAG = "not a tag of the scheme"


FIXES = {
    Reason.ENCODING: "Save it as UTF-8, or name the encoding of CSV: encoding:windows-1252 in "
    "private_columns, --encoding windows-1252 of init, encoding='windows-1252' of read.",
    Reason.NOT_JSON: "Write one JSON object on each line, without commas between them.",
    Reason.NO_PATIENT: "Fill the column. Save numbers as text: 1.23457E+11 is rounded, and no id.",
}


class Quarantine:
    """Counts accepted and rejected items, and refuses a source with too many rejected ones.

    A single tag that does not fit the scheme refuses the source.

    Counts of private input are for the operator alone.

    Args:
        largest_share: a source with more bad items than this share is refused as a whole.

    Attributes:
        taken: number of accepted items, which the reader counts.
        left_out: number of items that the source marks as errors, which the reader counts.
        passed_over: number of files of another format.
        schemes: the schemes of tags in which all accepted items are well-formed.
    """

    def __init__(self, largest_share: float = 0.1) -> None:
        self.largest_share = largest_share
        self.taken = 0
        self.left_out = 0
        self.passed_over = 0
        self.counts: Counter[Reason] = Counter()
        self.locations: dict[Reason, list[str]] = {}
        self.passed_locations: list[str] = []
        self.schemes: list[TagScheme] = []

    @property
    def rejected(self) -> int:
        """Number of rejected items."""
        return self.counts.total()

    def pass_over(self, location: str) -> None:
        """List a file of another suffix, which is not counted as an item."""
        self.passed_over += 1
        if len(self.passed_locations) < _LOCATIONS_KEPT:
            self.passed_locations.append(location)

    def reject(self, reason: Reason, location: str) -> None:
        """Count a rejected item.

        Args:
            reason: reason of the rejection.
            location: file and line, without any content.
        """
        self.counts[reason] += 1
        locations = self.locations.setdefault(reason, [])
        if len(locations) < _LOCATIONS_KEPT:
            locations.append(location)

    def finish(self, where: str) -> None:
        """Refuse a source without accepted items, with too many rejected ones, or an unknown tag.

        Raises:
            BadInput: names the most frequent reason, but no file, which may be a patient's name.
        """
        if not self.taken and not self.rejected:
            raise PrivateTextRefusal(
                "there is nothing to read", where=where, fix="Check path and format."
            )
        if self.counts[Reason.TAG]:
            # Rejecting only the sentences with the tag would change the task: with IOBES tags read
            # as IOB2, all sentences with an entity of one token would be lost.
            raise PrivateTextRefusal(
                "a tag does not fit the scheme",
                where=where,
                fix="The last column is O, or B-, I-, E-, S-, L- or U- before a type; set"
                " entities_scheme to the scheme of these tags, or to auto.",
            )
        if self.rejected <= self.largest_share * (self.taken + self.rejected) and self.taken:
            return
        reason, _ = self.counts.most_common(1)[0]
        extent = f"more than {self.largest_share:.0%}" if self.taken else "none"
        # The share itself would be an un-noised count of private items.
        what = f"{extent} of the items can{'not' if self.taken else ''} be used; mostly: {reason}"
        fix = FIXES.get(reason, "Check the format, or repair the source.")
        raise PrivateTextRefusal(what, where=where, fix=fix)

    def summary(self) -> dict[str, object]:
        """Return counts and locations, ready for JSON; for the operator alone."""
        return {
            "taken": self.taken,
            "left_out": self.left_out,
            "rejected": {str(r): n for r, n in sorted(self.counts.items())},
            "locations": {str(r): list(p) for r, p in sorted(self.locations.items())},
            "passed_over": self.passed_over,
            "locations_passed_over": list(self.passed_locations),
            "schemes": list(self.schemes),
        }
