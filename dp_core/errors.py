"""Errors that users see: one line each, without private text."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

OUT_OF_MEMORY = (
    "the memory is exhausted. Give the process more, and try again: what is done stays done."
)
_CODE = Path(__file__).resolve().parents[1]
_URL = re.compile(
    r"(?P<scheme>[A-Za-z0-9+.-]+:/{2})"
    r"(?:[^@/?#]*@)?"  # user and password
    r"(?P<place>[^@/?#:]*(?::\d+)?(?:/[^@?#]*)?)"
    r"(?:[?#][^@]*)?"  # options, which may hold a password too
)


def in_one_line(text: str) -> str:
    """Return a text with a space for each line end, control character or unpaired surrogate.

    A name in an error can hold any character. It must not add a line to a log, or break the log.
    """
    return "".join(character if character.isprintable() else " " for character in text)


class ConfideError(Exception):
    """Root of the errors that Confide raises on purpose.

    Args:
        what: the problem, in one clause.
        where: the field, file (never its content) or step that it concerns.
        fix: remedy for the reader.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        line = f"{where}: {what}" if where else what
        super().__init__(in_one_line(f"{line}. {fix}" if fix else line))

    def __reduce__(self) -> tuple[Callable[..., ConfideError], tuple[str]]:
        """Pickle what, where and fix separately, for errors of worker processes."""
        return partial(type(self), where=self.where, fix=self.fix), (self.what,)


class BadInput(ConfideError):
    """The input, spec or setting is wrong; retrying cannot help."""

    exit_code = 2


class PrivateTextRefusal(BadInput):
    """The content of a source text is refused: an answer without noise if the text is private.

    No ε covers such an answer. docs/privacy.md lists every place that gives one, and a test
    compares the list with the code.
    """


class PlanError(BadInput):
    """A privacy plan that claims more than its mechanism provides."""


class BudgetExceeded(ConfideError):
    """A reservation that would exceed the data set's privacy budget."""

    exit_code = 3


class Contradicted(ConfideError):
    """An audit refutes the privacy claim of a model; retrying does not change that."""

    exit_code = 4


class Unfinished(ConfideError):
    """The work stopped in good order before its end, which is not a failure; a retry continues it.

    The exit code is `EX_TEMPFAIL` of sysexits.h.
    """

    exit_code = 75


def kind_and_place(error: BaseException) -> str:
    """Return an unexpected error's kind and its place in our code, never its message.

    A library's message may quote its input, which may be private.
    """
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):  # does not read source files
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_CODE) and "site-packages" not in file.parts:
            place = f" at {file.relative_to(_CODE)}:{line}"
    number = error.errno if isinstance(error, OSError) else None
    reason = f" ({os.strerror(number)})" if number else ""
    return f"{type(error).__name__}{reason}{place}"


def is_full_disk(error: OSError) -> bool:
    """Return whether a disk was full; the same command may succeed later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed; a library that cannot be mapped is an `ImportError`."""
    if isinstance(error, ImportError):
        return "failed to map segment" in str(error)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def fault_line(error: BaseException) -> str:
    """Return an unexpected error as one line: its kind and place, never its message."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, OSError) and is_full_disk(error):
        return (
            f"the disk is full ({os.strerror(error.errno or 0)}). Make room where CONFIDE_HOME and "
            "CONFIDE_STORE are, and try again: what is done stays done."
        )
    return f"{kind_and_place(error)}. Set CONFIDE_DEBUG=1 to see the traceback."


def without_password(url: str) -> str:
    """Return a URL without user, password and options, or only its scheme if it is ambiguous."""
    match = _URL.fullmatch(url)
    if match:
        return match["scheme"] + match["place"]
    scheme, colon, _ = url.partition("://")
    if colon and scheme.replace("+", "").isalnum():
        return f"{scheme}://…"
    return "…" if "@" in url or "=" in url else url
