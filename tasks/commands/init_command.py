"""`confide init`: looks at a file of notes and writes the settings for a first run."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from dp_core.config.fields import one_line
from dp_core.config.privacy import LEAST_UNITS
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.registry import corpus_readers
from dp_core.data.readers.sources import bare_name, entries
from dp_core.data.readers.tables import (
    DELIMITERS,
    SUFFIXES,
    Layout,
    header_of,
    layout_of,
    recognised,
    shown_names,
)
from dp_core.errors import BadInput
from tasks.commands.output import as_json, options, write_answer, write_pairs, write_prose
from tasks.commands.settings_options import absolute
from tasks.protocol.defaults import default_delta
from tasks.protocol.settings import JobSettings

EPSILON = 8  # of the commands that are shown
ROLES = ("text", "patient", "document", "date")
_STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)  # first digits of a rounded bound


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("settings.json"),
    show_default=True,
    help="The settings file to write.",
)
@click.option("--dataset", help="Name in the privacy ledger; by default, the name of the file.")
@options(*(click.option(f"--{role}", metavar="COLUMN", help=f"Column: {role}.") for role in ROLES))
@click.option("--delimiter", type=click.Choice(list(DELIMITERS)), help="Between cells of CSV.")
@as_json
def command(file: Path, out: Path, dataset: str | None, **given: str | None) -> None:
    """Look at a file or folder of notes, and write the settings of its data.

    The command counts notes and privacy units for you, on this machine. It spends and registers
    nothing, and shows no text. FILE is CSV, Parquet, JSON lines, or a folder of .txt files.

    Example:
      confide init notes.csv
    """
    path = Path(absolute("FILE", str(file)))
    format = _format_of(path)
    columns = {} if format == "text" else _columns(path, format, given)
    counts = _Counts(path, format, _setting(columns))
    if format == "csv" and counts.quarantine.counts[Reason.ENCODING]:
        columns["encoding"] = "windows-1252"
        counts = _Counts(path, format, _setting(columns))
    counts.quarantine.finish(str(path))
    if counts.units < LEAST_UNITS:
        raise BadInput(
            f"it has fewer than {LEAST_UNITS} {counts.unit}s, too few to hide one of them",
            where=str(path),
        )
    settings = {
        "private_format": format,
        "private_path": str(path),
        "private_columns": _setting(columns),
        "private_dataset": dataset or _dataset_of(path),
        "unit": counts.unit,
        "declared_units": _rounded_up(counts.units),
    }
    _write(settings, out)
    found = {
        "format": format,
        **columns,
        "notes": counts.quarantine.taken,
        "notes that cannot be used": counts.quarantine.rejected,
        "notes marked as errors": counts.quarantine.left_out,
        f"{counts.unit}s": counts.units,
    }
    commands = _next_commands(settings, out)
    answer = {"found": found, "settings": settings, "written": str(out), "next": commands}
    write_answer(answer, lambda: _show(answer))


def _setting(columns: Mapping[str, str]) -> str:
    return ",".join(f"{role}:{name}" for role, name in columns.items())


class _Counts:
    """Notes and privacy units of a source, which is read once; for the operator alone."""

    def __init__(self, path: Path, format: str, columns: str) -> None:
        self.quarantine = Quarantine()
        patients, nameless, documents = set[str](), 0, set[tuple[str, str]]()
        for document in corpus_readers(columns)[format](path, self.quarantine):
            patients.add(document.patient_id)
            if document.document_id:
                documents.add((document.patient_id, document.document_id))
            else:
                nameless += 1
        self.unit = "document" if not patients or "" in patients else "patient"
        self.units = len(patients) if self.unit == "patient" else len(documents) + nameless


def _format_of(path: Path) -> str:
    """Return the format that most files of a source have, by their suffixes."""
    formats = {suffix: name for name in ("csv", "parquet", "jsonl") for suffix in SUFFIXES[name]}
    formats[".txt"] = "text"
    known = Counter(formats.get(Path(bare_name(f)).suffix.lower()) for f in entries(path))
    del known[None]
    if len(known) != 1:
        several = f"files of several formats: {', '.join(sorted(map(str, known)))}"
        raise BadInput(
            several if known else "no file of a known format",
            where=str(path),
            fix=f"Give one file, or a folder with files of one format: {', '.join(formats)}.",
        )
    return str(known.popitem()[0])


def _columns(path: Path, format: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the setting's parts: the column of each role, and the delimiter of CSV.

    Raises:
        BadInput: there is no column of text, or several columns could have a role.
    """
    delimiter = given["delimiter"] or ""
    layout = Layout(delimiter=DELIMITERS.get(delimiter, ""))
    try:
        names = header_of(path, format=format, layout=layout)
    except BadInput:
        if format != "csv":
            raise
        layout = layout_of(format, "encoding:windows-1252")
        names = header_of(path, format=format, layout=layout)
    shown = shown_names(names, {column.casefold() for column in given.values() if column})
    there = f"Its columns: {shown}." if shown else "It may have no header line with names."
    columns = {}
    for role, places in recognised(names).items():
        candidates = [given[role]] if given.get(role) else [names[place] for place in places]
        if missing := set(candidates) - set(names):
            raise BadInput(f"it has no column {missing.pop()}", where=f"--{role}", fix=there)
        if len(candidates) > 1 and role in ("text", "patient", "document"):
            raise BadInput(
                f"several columns could hold the {role}: {', '.join(map(str, candidates))}",
                where=str(path),
                fix=f"Choose one: --{role} {candidates[0]}",
            )
        if len(candidates) == 1:
            columns[role] = str(candidates[0])
    if "text" not in columns:
        raise BadInput(
            "no column of text is recognised",
            where=str(path),
            fix=f"Name it: --text COLUMN. {there}",
        )
    return columns | ({"delimiter": delimiter} if delimiter else {})


def _dataset_of(path: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", bare_name(path).partition(".")[0]).strip("._-")
    return name.lower()[:64] or "notes"


def _rounded_up(units: int) -> int:
    """Return the next round number above a count, which many counts share."""
    size = 10 ** (len(str(units)) - 1)
    return next(bound for step in _STEPS if (bound := int(step * size)) > units)


def _write(settings: Mapping[str, Any], out: Path) -> None:
    """Write the settings, after checking that `confide run` accepts them.

    Raises:
        BadInput: the settings are refused, or the file cannot be written.
    """
    try:
        JobSettings.model_validate(settings)
    except ValidationError as error:
        raise BadInput(one_line(error), where="settings") from None
    try:
        out.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise BadInput(f"cannot be written ({reason})", where=f"--out {out}") from None


def _next_commands(settings: Mapping[str, Any], out: Path) -> list[str]:
    dataset, unit = settings["private_dataset"], settings["unit"]
    budget = f"--epsilon {EPSILON} --delta {default_delta(settings['declared_units']):g}"
    return [
        f"confide advise --settings {out} {budget} --write {out}",
        f"confide ledger register {dataset} --unit {unit} {budget}",
        f"confide run --settings {out}",
    ]


def _show(answer: Mapping[str, Any]) -> None:
    settings = answer["settings"]
    write_pairs(settings["private_path"], answer["found"])
    write_prose(
        f"declared_units is {settings['declared_units']:,}. This bound becomes public: it is "
        "rounded up, and does not tell the exact number. Change it if you know a better one."
    )
    write_prose(
        f"Written: {answer['written']}. Nothing is spent or registered. Next, with an ε of your "
        "choice for everything together:"
    )
    for line in answer["next"]:
        click.echo(f"  {line}")
