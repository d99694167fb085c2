"""The errors that people see: one line each, never with private text in it."""

from __future__ import annotations


class ConfideError(Exception):
    """Root of the errors that Confide raises on purpose.

    Args:
        what: what went wrong, in one clause.
        where: the field, file (never its content) or step it concerns.
        fix: what the reader can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        line = f"{where}: {what}" if where else what
        super().__init__(f"{line}. {fix}" if fix else line)


class BadInput(ConfideError):
    """The input, spec or setting is wrong; trying again cannot help."""

    exit_code = 2


class PlanError(BadInput):
    """A privacy plan that would claim more than the mechanism gives."""


class BudgetExceeded(ConfideError):
    """A reservation that would pass the data set's privacy budget."""

    exit_code = 3


class Unfinished(ConfideError):
    """The work stopped in good order before its end; run again, it goes on: no failure.

    The exit code is `EX_TEMPFAIL` of sysexits.h: try again.
    """

    exit_code = 75
