"""The Python API, for a person in a notebook: `import confide` gives these names.

    notes = confide.read("notes.csv", text="NoteText", patient="PatNr")
    budget = confide.Ledger("ledger.db").register("ward-notes", epsilon=8, delta=1e-5)
    model = confide.train(
        notes, declared_units=1000, public="bert-base/", budget=budget, epsilon=4
    )
    print(model.epsilon, model.privacy_statement())
    model.audit(); model.save("ward-bert/")

`train` runs the job that `confide run` runs with the same settings, and reuses its outputs. All
other rules are the job's, too: the plan, the ledger, the provenance, and the labels of numbers.
Objects show only public numbers in a notebook, whose file may be shared.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dp_core.audit.protocol import AuditRecord, ModelVerdict
from dp_core.data.readers.note_tables import Layout
from dp_core.errors import BadInput, BudgetExceeded, ConfideError, Contradicted
from dp_core.labels import Label
from dp_core.models.hugging_face import CONFIG
from dp_core.privacy.ledger import Remaining
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import DatasetTotal, totals
from tasks.commands.export_command import export
from tasks.commands.init_command import NoteSource, format_of
from tasks.commands.ledger_command import check_name
from tasks.commands.settings_options import absolute, ready_settings
from tasks.context import content_key
from tasks.evidence.audits import claim_of, records_of, verdict_on
from tasks.execution.run_job import Job, Watcher, one_after_the_other, run_and_give_back
from tasks.protocol.defaults import rounded_down
from tasks.protocol.job import job_steps, names_of, point_and_task
from tasks.protocol.messages import StepProgress, StepResult
from tasks.protocol.points import DP_MODEL
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import promotion
from tasks.releases import declarations
from tasks.releases.deployment_ledger import confirm_releases, open_ledger
from tasks.results import STATEMENT_WORDS, read_result
from tasks.runtime.deployment import Deployment, sqlite_file, sqlite_url
from tasks.storage.backends import keyed_digest
from tasks.storage.store import Store

__all__ = ["Ledger", "read", "train"]

_MISSING = ("None", "nan", "NaN", "NaT", "<NA>")
_FAILURES = {kind.exit_code: kind for kind in (BadInput, BudgetExceeded, Contradicted)}


class Shown:
    """An object that shows itself by public numbers alone."""

    def public(self) -> Mapping[str, object]:
        """Return the properties that may be seen by every reader of a notebook."""
        raise NotImplementedError

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {value}" for name, value in self.public().items())
        return f"<{type(self).__name__} {shown}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in self.public().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


# --- private text


@dataclass(frozen=True, repr=False)
class PrivateNotes(Shown):
    """Private text that `read` has looked at. The number of its rows is private.

    Attributes:
        origin: the path, list, DataFrame or Dataset.
        given: the named columns, by role.
        digest: of the rows that were read.
        texts: of the set of texts, in any order and format.
    """

    origin: Any
    given: Mapping[str, str]
    digest: str
    texts: str

    def public(self) -> Mapping[str, object]:
        """Return the named columns alone; no function of the texts."""
        named = {f"column of {role}": column for role, column in self.given.items() if column}
        return {"size": "private"} | named

    def settings(self, deployment: Deployment) -> dict[str, str]:
        """Return the settings of the corpus; rows from memory are first written for the job.

        Raises:
            BadInput: the rows are no longer the rows that were read.
        """
        with _file_of(self.origin, self.given) as (file, given):
            if keyed_digest(file, b"") != self.digest:
                raise BadInput("the text has changed since `read`", fix="Read it again.")
            if not isinstance(self.origin, str):
                name = keyed_digest(file, content_key(deployment))
                copy = deployment.work / "read" / f"{name}.jsonl"
                copy.parent.mkdir(parents=True, exist_ok=True)
                file = shutil.copyfile(file, copy)
            return NoteSource.of(file, given).settings


def read(
    source: Any,
    *,
    text: str = "",
    patient: str = "",
    document: str = "",
    date: str = "",
    encoding: str = "",
) -> PrivateNotes:
    """Look at private text on this machine. Nothing is spent, and no text is shown.

    Args:
        source: a file or folder (CSV, Parquet, JSON lines, `.txt`), a list of strings, a
            `pandas.DataFrame`, or a `datasets.Dataset`. `train` refuses text that has changed.
        text, patient, document, date: columns of a table; common names are recognised. Without a
            column of patients, a model can protect documents alone.
        encoding: of CSV files: `utf-8` or `windows-1252`.

    Raises:
        BadInput: the source cannot be read, lacks a column, or has too few units.
    """
    given = {"text": text, "patient": patient, "document": document, "date": date}
    given |= {"encoding": encoding} if encoding else {}
    for role, column in given.items():
        _refuse_type(column, str, f"read: {role}", "a name")
    if isinstance(source, str | os.PathLike):
        if "://" in os.fspath(source):
            raise BadInput("not on this machine", where=f"read: {source}", fix="Copy it here.")
        source = absolute("read", os.fspath(source))
    with _file_of(source, given) as (file, columns):
        texts = NoteSource.of(file, columns).texts
        return PrivateNotes(source, given, keyed_digest(file, b""), texts)


@contextmanager
def _file_of(source: Any, given: Mapping[str, str]) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Yield the path of a source and its columns by role.

    Rows in memory are in a temporary file, sorted, so that equal rows are an equal file. Its
    columns have the names of their roles.
    """
    if isinstance(source, str):
        yield Path(source), given
        return
    try:
        columns = _columns_of(source, given)
        rows = zip(*(map(_cell, cells) for cells in columns.values()), strict=True)
        lines = sorted(json.dumps(dict(zip(columns, row, strict=True))) for row in rows)
        with TemporaryDirectory(prefix="confide-") as folder:  # for this user alone
            file = Path(folder) / "notes.jsonl"
            file.write_text("".join(f"{line}\n" for line in lines))
            yield file, {role: role for role in columns}
    except BadInput as error:
        where = f"read: {type(source).__name__}"
        raise BadInput(error.what, where=where, fix=error.fix) from None


def _columns_of(source: Any, given: Mapping[str, str]) -> dict[str, Iterable[Any]]:
    """Return the cells of a table in memory by role; a list of strings has texts alone.

    Raises:
        BadInput: the object is neither, or a column is missing or ambiguous.
    """
    named = {role: column for role, column in given.items() if column and role != "encoding"}
    is_list = isinstance(source, list | tuple) and all(isinstance(text, str) for text in source)
    if is_list and not named:
        return {"text": source}
    names = getattr(source, "columns", getattr(source, "column_names", None))
    if names is None or isinstance(names, Mapping):  # a Mapping has the columns of each split
        fix = "Give a path, a list of strings without columns, a DataFrame, or one Dataset."
        raise BadInput("it is no table, and no list of strings alone", fix=fix)
    roles = Layout(named).with_date([name for name in names if isinstance(name, str)])
    return {role: source[column] for role, column in roles.items()}


def _cell(value: Any) -> str | None:
    """Return a cell as text, or None for a missing value of Python, NumPy or pandas."""
    text = str(value)
    return None if not isinstance(value, str) and text in _MISSING else text


# --- the ledger


class LedgerFile(Shown):
    """The privacy ledger of a deployment.

    Args:
        file: the ledger's file, which is made if there is none. Without it, the ledger of the
            command line. Next to a new file, a folder of the same name with the ending `.confide`
            holds the secret seeds and all outputs (it is the file's `CONFIDE_HOME`).
    """

    def __init__(self, file: str | os.PathLike[str] | None = None) -> None:
        here = Deployment.from_environment()
        path = sqlite_file(here.ledger) if file is None else Path(absolute("Ledger", str(file)))
        if path is not None and path != sqlite_file(here.ledger):
            is_home = (path.parent / "seeds").is_dir()
            home = path.parent if is_home else path.with_suffix(".confide")
            others = {n: value for n, value in os.environ.items() if n not in here.variables}
            places = {"CONFIDE_HOME": str(home), "CONFIDE_LEDGER": sqlite_url(path)}
            here = Deployment.from_environment(others | places)
        self.deployment = here
        here.prepare()

    def public(self) -> Mapping[str, object]:
        """Return the place of the ledger, and its data sets."""
        names = ", ".join(open_ledger(self.deployment).datasets())
        return {"ledger": self.deployment.ledger_place, "data sets": names or "none"}

    def register(
        self,
        name: str,
        *,
        epsilon: float,
        delta: float,
        unit: str = "patient",
        shares_budget_with: str | None = None,
    ) -> RegisteredBudget:
        """Register the budget of a private data set, which can never be raised.

        Args:
            name: of the data set; another name for the same people would be a second budget.
            epsilon, delta: of everything that is ever released of the data set. An ε above 500 is
                for studies: the models cannot be saved.
            unit: the protected unit: `patient`, `document` or `example`.
            shares_budget_with: a registered data set that may hold the same people.

        Raises:
            BadInput: an argument is invalid, or the name has another budget.
        """
        check_name(name)
        _refuse_type(epsilon, Real, "register: epsilon", "a number")
        _refuse_type(delta, Real, "register: delta", "a number")
        if unit not in list(PrivacyUnit):
            raise BadInput(f"{unit!r} is none of {', '.join(PrivacyUnit)}", where="register: unit")
        terms, shared = (PrivacyUnit(unit), epsilon, delta), shares_budget_with
        open_ledger(self.deployment).register_dataset(name, *terms, shares_budget_with=shared)
        return RegisteredBudget(self.deployment, name)


Ledger = LedgerFile  # the name in `confide`


@dataclass(frozen=True, repr=False)
class RegisteredBudget(Shown):
    """The registered budget of a private data set."""

    deployment: Deployment
    name: str

    @property
    def remaining(self) -> Remaining:
        """The terms of the budget, and the spent share."""
        return open_ledger(self.deployment).remaining(self.name)

    def public(self) -> Mapping[str, object]:
        """Return the terms of the budget and the spent share, which no private text influences."""
        now = self.remaining
        terms = {"unit": now.budget.unit, "ε": now.budget.epsilon, "δ": now.budget.delta}
        return {"data set": self.name, **terms, "spent": f"{now.share:.1%}"}


# --- training


def train(
    notes: PrivateNotes,
    *,
    budget: RegisteredBudget,
    declared_units: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    public: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> PrivateModel:
    """Train, measure and report a private model, as `confide run` does with the same settings.

    After a stop, the same call continues, and nothing is charged twice.

    Args:
        notes: the private text.
        budget: pays for all releases. Nothing is read before it has admitted them.
        declared_units: upper bound on the number of units that people know without the texts, for
            example all patients that the ward can have had in these years. It becomes public.
            It is needed: a bound that followed from the texts could change with one unit.
        epsilon: ε of all releases together; by default all of the budget.
        delta: δ of the same guarantee; by default the budget's. With a smaller ε it is half of its
            share, so that the budget admits later trainings.
        public: a public model in the layout of Hugging Face, or public text. Only name files that
            are public: this argument declares them so, as `confide ledger declare-public` does.
            None: made-up text, which teaches a model little of real language.
        settings: further settings of the job by name (`confide run --show-settings`).

    Raises:
        BadInput: an argument or the text is refused, before anything is charged.
        BudgetExceeded: the budget has no room for these releases.
        Contradicted: an audit refutes the model's claim.
    """
    _refuse_type(notes, PrivateNotes, "train: notes", "what `read` returns")
    _refuse_type(budget, RegisteredBudget, "train: budget", "what `register` returns")
    _refuse_type(epsilon, Real | None, "train: epsilon", "a number")
    deployment, terms = budget.deployment, budget.remaining.budget
    assert terms.epsilon is not None and terms.delta is not None  # noqa: S101 - it is private
    unit, epsilon = str(terms.unit), terms.epsilon if epsilon is None else epsilon
    if not declared_units:
        what = f"no bound on the number of {unit}s is declared, and none may follow from the texts"
        fix = "Give declared_units=N, a number that people know without the texts."
        raise BadInput(what, where="train: declared_units", fix=fix)
    if delta is None and epsilon < terms.epsilon:
        delta = rounded_down(terms.delta * epsilon / terms.epsilon / 2)
    derived = {
        **notes.settings(deployment),
        "private_dataset": budget.name,
        "unit": unit,
        "declared_units": declared_units,
        "target_epsilon": epsilon,
        "target_delta": terms.delta if delta is None else delta,
    }
    if clash := sorted(settings.keys() & derived.keys()):
        raise BadInput("the arguments of train determine it", where=f"settings: {clash[0]}")
    declared = None if public is None else absolute("public", str(public))
    values = settings | derived | _public_settings(declared)
    job = ready_settings(JobSettings, values, deployment, to_declare=declared)
    _refuse_other_names(notes, job, budget)
    specs = job_steps(job, promotion())
    if declared is not None:  # last, since a refused training must leave no declaration
        declarations.declare_public(declared, deployment, known_private=False)
    steps = [(*point_and_task(name), spec) for name, spec in specs.items()]
    with _progress(len(steps)) as watch:
        outcome = run_and_give_back(Job.now("dp_bert", steps), deployment, watch)
    if outcome.exit_code:
        raise _FAILURES.get(outcome.exit_code, ConfideError)(outcome.failed)
    training = specs[names_of(DP_MODEL)["pretraining"]]
    return PrivateModel(budget, training.output)


def _public_settings(path: str | None) -> dict[str, str]:
    """Return the settings that name public files."""
    if path is None:
        return {}
    if (Path(path) / CONFIG).is_file():
        return {"public_model": path}
    return {"public_format": format_of(Path(path)), "public_path": path}


def _refuse_type(value: object, kind: Any, where: str, needed: str) -> None:
    if not isinstance(value, kind):
        raise BadInput(f"it is of type {type(value).__name__}", where=where, fix=f"Give {needed}.")


def _refuse_other_names(notes: PrivateNotes, job: JobSettings, budget: RegisteredBudget) -> None:
    """Refuse text that was read under a name with another budget; remember its set of texts.

    Raises:
        BadInput: both budgets together could be spent on the same people.
    """
    key, ledger = content_key(budget.deployment), open_ledger(budget.deployment)
    texts = hmac.new(key, notes.texts.encode(), hashlib.sha256).hexdigest()
    digests = (texts, keyed_digest(Path(job.private_path), key))
    budgets = ledger.datasets()
    for name, other in budgets.items():
        is_other = other.name != budgets[budget.name].name
        if is_other and any(ledger.sources.is_text_of(digest, name) for digest in digests):
            what = f"the text was read as {name}, which has another budget"
            raise BadInput(what, where=budget.name, fix=f"Train with the budget of {name}.")
    ledger.sources.read_as_private(texts, budget.name)


@contextmanager
def _progress(steps: int) -> Iterator[Watcher]:
    """Yield a watcher that shows the number of begun steps, and no times.

    The duration of a step reveals the size of private data.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError:
        with one_after_the_other(steps, shows_times=False) as watch:
            yield watch
        return
    begun: dict[str, str] = {}
    with tqdm(total=steps, bar_format="{desc} {bar} {n_fmt}/{total_fmt}") as bar:

        def show(name: str, now: StepProgress) -> None:
            line = f"{name} {now.done}/{now.total}" if now.total else name
            if begun.get(name) != line:
                begun[name] = line
                bar.n = len(begun)
                bar.set_description_str(line)  # draws the bar

        yield show


# --- the model


@dataclass(frozen=True, repr=False)
class AuditFindings(Shown):
    """The findings of all audits of a model, run or not, and the verdict.

    A record with the label `operator` is not shown: private text without noise influenced it.
    """

    records: tuple[AuditRecord, ...]
    verdict: ModelVerdict

    def public(self) -> Mapping[str, object]:
        """Return the verdict and the findings that may be published."""
        shown = [record for record in self.records if record.label is not Label.OPERATOR]
        return {"verdict": self.verdict.sentence} | {r.name: r.finding for r in shown}


@dataclass(frozen=True, repr=False)
class PrivateModel(Shown):
    """A model that was trained with differential privacy, in the store.

    Attributes:
        budget: the budget that its training was charged to.
        uri: the output of the training.
    """

    budget: RegisteredBudget
    uri: str

    @property
    def _store(self) -> Store:
        return self.budget.deployment.open_store()

    def _confirmed(self) -> StepResult:
        """Return the training's result, if the files are unchanged and the ledger has its releases.

        Raises:
            BadInput: the weights or another file changed, or the ledger lacks a release.
        """
        store, result = self._store, read_result(self._store, self.uri)
        if result is None or store.damaged(self.uri):
            what = "the model's files have changed since its training"
            raise BadInput(what, where=self.uri, fix="Restore them from a backup.")
        confirm_releases(open_ledger(self.budget.deployment), result.releases, self.uri)
        return result

    def _total(self) -> DatasetTotal:
        of_budgets = totals(self._confirmed().releases)
        return next(total for total in of_budgets if self.budget.name in total.datasets)

    @property
    def epsilon(self) -> float | None:
        """The earned ε of all releases of the data set; None if they have no total."""
        return self._total().epsilon

    @property
    def delta(self) -> float:
        """The δ of the same guarantee."""
        return self._total().delta

    def public(self) -> Mapping[str, object]:
        """Return the claim."""
        return {"claim": claim_of(self._confirmed().releases)}

    def privacy_statement(self) -> str:
        """Return the privacy statement in Markdown, as `PRIVACY.md` of the saved model has it."""
        self._confirmed()
        return (self._store.local_copy(self.uri) / STATEMENT_WORDS).read_text()

    def audit(self) -> AuditFindings:
        """Return the findings of all audits of these weights, as `confide audit` does.

        Raises:
            BadInput: the weights are no longer those of the training.
            Contradicted: an audit refutes the model's claim.
        """
        result, store = self._confirmed(), self._store
        verdict = verdict_on(store, self.uri, result)
        if verdict.word == "contradicted":
            raise Contradicted(verdict.sentence, where=self.uri, fix="Do not release the model.")
        return AuditFindings(records_of(store, self.uri, result), verdict)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Copy the model to a new folder, with its privacy statement, as `confide export` does."""
        self._confirmed()
        path = Path(absolute("save", str(folder)))
        export(self._store, self.uri, path)
        return path

    def to_transformers(self) -> Any:
        """Return the model as a PyTorch model of `transformers`.

        Raises:
            BadInput: `transformers` is not installed.
        """
        try:
            import transformers
        except ImportError:
            fix = "Install transformers and torch."
            raise BadInput("transformers is not installed", fix=fix) from None
        with TemporaryDirectory(prefix="confide-") as folder:
            saved = self.save(Path(folder) / "model")
            (architecture,) = json.loads((saved / CONFIG).read_text())["architectures"]
            return getattr(transformers, architecture).from_pretrained(saved)
