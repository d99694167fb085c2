"""Provenance: the ancestry of a step's output, derived from its inputs, never from its spec.

Every input is opened by one of these functions. They check which step made it, whether its text is
private, and which vocabulary it was cut with. The units of an input are read from the input
(`private_units`). A spec names them too, because a whole run is registered before any data is
read, and `charge` compares both. Each input carries its releases: the step's context collects the
releases of all opened inputs, so that no step can omit one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from dp_core.config.privacy import MOST_CLAIM, UnitConfig
from dp_core.data.privacy_units import nameless
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.privacy.ledger import Entry
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import operator_only
from tasks.context import StepContext
from tasks.protocol.messages import StepResult
from tasks.results import KEPT, Input, kept_folder, of_last_model, read_result
from tasks.storage.store import Store, sha256_of

PRETRAINED = ("pretrain", "select")
MODELS = (*PRETRAINED, "finetune")  # the steps whose output is a model

Role = Literal["private", "public", "released"]  # released: made from a charged release


@dataclass(frozen=True)
class PrivateUnits:
    """The private units in an input, to which a release of the input is charged.

    Attributes:
        dataset: name of the data set in the ledger.
        unit: the protected unit; None if the first release chooses it (a corpus).
        declared_units: the public bound on their number, with audit canaries; None if the release
            declares it.
        max_examples_per_unit: maximum rows per unit; None if rows are not bounded yet.
        patients: whether each text names its patient.
        origin: the step that made the input.
        example: what an example is, empty for another unit; None for a corpus or labels.
    """

    dataset: str
    unit: PrivacyUnit | None
    declared_units: int | None = None
    max_examples_per_unit: int | None = None
    _: KW_ONLY
    patients: bool
    origin: str
    example: str | None = None

    def refuse_other(self, planned: Entry) -> None:
        """Refuse a planned release for other units than these.

        Raises:
            BadInput: the spec's data set, unit or declared bound is not the input's.
        """
        for name, held, charged in (
            ("dataset", self.dataset, planned.dataset),
            ("unit", self.unit, planned.unit),
            ("words_per_unit", self.example, planned.event.example),
            ("declared_units", self.declared_units, planned.declared_units),
        ):
            if held is not None and held != charged:
                raise BadInput(
                    f"the input has {held}, the spec charges {charged}",
                    where=f"{name} of the {self.origin} step's output",
                    fix="Give the spec the value of the input.",
                )
        self.refuse_nameless(planned.unit)

    def refuse_nameless(self, unit: PrivacyUnit) -> None:
        """Refuse to protect patients where texts do not name them.

        Raises:
            PrivateTextRefusal: the unit is the patient, and a text names none.
        """
        if unit is PrivacyUnit.PATIENT and not self.patients:
            if self.origin != "entities":
                raise nameless()
            raise PrivateTextRefusal(
                "the labelled documents name no patient",
                where="entities_unit",
                fix="Protect the unit `document`, or list each document's patient: "
                "entities_patients.",
            )


def corpus_at(context: StepContext, uri: str, role: Role, *, field: str = "corpus_uri") -> Input:
    """Return a corpus in normal form.

    Raises:
        BadInput: the output is not a corpus, or has another role.
    """
    return _opened(context, uri, ("corpus",), field, role=role)


def output_of(
    context: StepContext,
    uri: str,
    step: Literal["canaries", "checkpoint", "entities", "phrases", "vocabulary"],
    vocabulary: Input | None = None,
) -> Input:
    """Return the output of a step, which a spec names in the field `{step}_uri`.

    Args:
        context, uri, step: of the output.
        vocabulary: the vocabulary that the output must be made with, or a model or store that was
            made with it; None if the output needs none.

    Raises:
        BadInput: another step made the output, or made it with another vocabulary.
    """
    return _opened(context, uri, (step,), f"{step}_uri", vocabulary=vocabulary)


def released_text_at(context: StepContext, uri: str) -> Input:
    """Return a corpus in normal form without private text: public, or written by a step.

    Raises:
        BadInput: the output is not a corpus, or is private.
    """
    source = _opened(context, uri, ("corpus", "written_text"), "corpus_uri")
    if fact(source, "role") == "private":
        raise BadInput("the text is private, and must be public", where="corpus_uri")
    return source


def rows_at(context: StepContext, uri: str, role: Role, vocabulary: Input, *, field: str) -> Input:
    """Return a token store of that role that was cut with the vocabulary.

    Raises:
        BadInput: the output is not a token store, has another role, or was cut with another
            vocabulary.
    """
    return _opened(context, uri, ("token_store",), field, role=role, vocabulary=vocabulary)


def model_at(
    context: StepContext,
    uri: str,
    *,
    field: str,
    steps: Sequence[str] = MODELS,
    vocabulary: Input | None = None,
    updates: int = 0,
) -> Input:
    """Return a model; its vocabulary is checked if one is given.

    Args:
        context, uri, field, steps, vocabulary: as for every input.
        updates: number of updates after which the model was kept; 0 for the last model. All kept
            models descend from the same releases, because one charge covers all of them.

    Raises:
        BadInput: the output is not a model, has another vocabulary, or no such model was kept.
    """
    training = _opened(context, uri, steps, field, vocabulary=vocabulary)
    if not updates:
        return training
    kept = models_by_updates(training)
    if updates not in kept:
        raise BadInput(
            f"no model was kept after {updates} updates",
            where="model_updates",
            fix=f"There are those after {', '.join(map(str, kept))}.",
        )
    folder, known = kept[updates], training.facts.get("weights_digest")
    digest = sha256_of(folder / "model.safetensors") if known else ""
    facts = training.facts | {"weights_digest": digest}
    return Input(training.result.model_copy(update={"facts": facts}), folder, uri)


def models_by_updates(model: Input) -> dict[int, Path]:
    """Return the folders of the models that a training left, by updates done, the last one last."""
    kept = {int(n): model.folder / kept_folder(n) for n in model.facts.get("kept_updates", ())}
    return kept | {int(model.facts.get("updates", 0)): model.folder}


_UNIT_FACTS: dict[str, tuple[str, ...]] = {  # facts on the units in the output of a step
    "corpus": (),
    "entities": ("unit",),
    "token_store": ("unit", "example", "declared_units", "max_examples_per_unit"),
}


def private_units(source: Input) -> PrivateUnits:
    """Return the private units of an input.

    Args:
        source: a private corpus, a private store, or private labels.

    Raises:
        BadInput: the input is public, or holds no units.
    """
    step = source.result.step
    if step not in _UNIT_FACTS:
        raise BadInput(f"the output of the step {step} holds no units", where="private units")
    if fact(source, "public") if step == "entities" else fact(source, "role") != "private":
        raise BadInput("it is public: nothing is charged for it", where=f"output of {step}")
    held: dict[str, Any] = {name: fact(source, name) for name in _UNIT_FACTS[step]}
    if step == "token_store":
        # Audit canaries are units of every private training on these rows, in or out.
        held["declared_units"] += source.facts.get("audit_canaries", 0)
    return PrivateUnits(
        dataset=fact(source, "dataset"),
        unit=PrivacyUnit(held.pop("unit")) if held else None,
        patients=step == "token_store" or bool(fact(source, "all_name_a_patient")),
        origin=step,
        **held,
    )


def refuse_another_unit(
    dataset: str, units: UnitConfig, vocabulary: Input, *, protects: str
) -> None:
    """Refuse other protected units than the vocabulary's, since the releases would have no total.

    Args:
        dataset: the data set of the step's input.
        units: the units that the step would protect.
        vocabulary: the vocabulary that the step uses.
        protects: names the output of the step, in the error.

    Raises:
        BadInput: the unit, or what an example is, is not the vocabulary's.
    """
    if dataset != fact(vocabulary, "dataset") or not vocabulary.result.releases:
        return
    held = (fact(vocabulary, "unit"), fact(vocabulary, "example"))
    if held != (units.unit, units.example):
        raise BadInput(
            f"the vocabulary of this data set protects the unit {_named(*held)}, the {protects}"
            f" would protect {_named(units.unit, units.example)}",
            where="unit, words_per_unit",
            fix=f"Choose one unit for vocabulary and {protects}.",
        )


def _named(unit: str, example: str) -> str:
    return f"{unit} of {example}" if example else unit


def releasable_model(store: Store, uri: str) -> StepResult:
    """Return the result of a training whose model may leave the operator.

    Raises:
        BadInput: there is no model, or it stays with the operator.
    """
    result = read_result(store, uri)
    if result is None or result.step not in MODELS:
        raise BadInput("no model there", where=uri, fix="Give a training step's output.")
    if operator_only(result.releases):
        raise BadInput(
            "trained on private text without privacy, or with the budget of a study (ε above"
            f" {MOST_CLAIM:g}): it has no guarantee, and is the operator's alone",
            where=uri,
            fix="Give the output of a training with DP.",
        )
    return result


def refuse_operator_ancestors(context: StepContext) -> None:
    """Refuse a release that descends from an output for the operator only.

    A vocabulary of exact counts is requested in the run's settings and therefore deliberate, and
    so is the budget of a study. A model trained with either is made, charged for its training, and
    stays with the operator like every other descendant (`StepContext.for_operator_alone`).

    Raises:
        BadInput: an input descends from a use of private text without privacy.
    """
    if operator_only([r for r in context.releases if not r.for_operator_alone]):
        raise BadInput(
            "an input descends from private text that was used without privacy: nothing made of"
            " it has a finite ε",
            where=f"inputs of {context.run.task}",
            fix="Begin with a model trained with DP, or on public text alone.",
        )


def fact(source: Input, name: str) -> Any:
    """Return a fact that a step recorded about its output.

    Raises:
        BadInput: the fact is missing.
    """
    if name not in source.facts:
        raise BadInput(
            f"the result does not say its {name}",
            where=f"output of {source.result.step}",
            fix="Run the step that makes it again.",
        )
    return source.facts[name]


def vocabulary_digest(source: Input) -> str:
    """Return the digest of a vocabulary, or of the vocabulary that the input was made with."""
    is_one = source.result.step == "vocabulary"
    return str(fact(source, "digest" if is_one else "vocabulary_digest"))


def _opened(
    context: StepContext,
    uri: str,
    steps: Sequence[str],
    field: str,
    *,
    role: Role | None = None,
    vocabulary: Input | None = None,
) -> Input:
    source = context.input(uri)
    if source.result.step not in steps:
        raise BadInput(
            f"it is the output of the step {source.result.step}",
            where=field,
            fix=f"Give the output of {' or '.join(steps)}.",
        )
    if role is not None and fact(source, "role") != role:
        raise BadInput(f"the text is {source.facts['role']}, and must be {role}", where=field)
    if vocabulary is not None and vocabulary_digest(source) != vocabulary_digest(vocabulary):
        raise BadInput(
            "it was made with another vocabulary", where=field, fix="Give inputs of one vocabulary."
        )
    return source


_SUFFIX = ".safetensors"


def origin_of_export(store: Store, folder: Path) -> str:
    """Return the training output whose last model was exported to this folder.

    Raises:
        BadInput: as `find_origin`; or no training of this deployment made the weights, or they
            belong to a model that a training saved before its end.
    """
    if uri := find_origin(store, folder):
        digests = store.digests(uri)
        if not _weights_in(folder) <= {digests[name] for name in of_last_model(digests)}:
            raise BadInput(
                "its training saved this model before the end",
                where=str(folder),
                fix=f"Make evidence of the last model, which has the same claim: --uri {uri}",
            )
        return uri
    raise BadInput(
        "no training of this deployment made these weights",
        where=str(folder),
        fix="Make evidence in the deployment that trained the model, which has its ledger.",
    )


def find_origin(store: Store, folder: Path) -> str | None:
    """Return the output that was exported to this folder, or None if it is not in the store.

    The digests of the weights identify the output. An exported adapter is found by its weights.

    Raises:
        BadInput: there are no weights, or another file of the folder was changed.
    """
    files = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.is_file()}
    weights = _weights_in(folder)
    if not weights:
        raise BadInput(
            "no model there", where=str(folder), fix="Give a folder from confide export, or --uri."
        )
    for step in MODELS:
        for uri in store.outputs(step):
            digests = store.digests(uri)
            if weights <= set(digests.values()):
                _refuse_changed(folder, files, _exported_with(weights, digests))
                return uri
    return None


def _weights_in(folder: Path) -> set[str]:
    return {sha256_of(file) for file in folder.rglob(f"*{_SUFFIX}") if file.is_file()}


def _exported_with(weights: set[str], digests: dict[str, str]) -> dict[str, str]:
    """Return the digests of the files that are exported with these weights, by their names.

    Models saved during a training have separate subfolders.
    """
    for kept in sorted({name.split("/")[1] for name in digests if name.startswith(f"{KEPT}/")}):
        inside = f"{KEPT}/{kept}/"
        saved = {n.removeprefix(inside): d for n, d in digests.items() if n.startswith(inside)}
        if weights <= set(saved.values()):
            return saved
    return digests


def _refuse_changed(folder: Path, files: dict[str, Path], digests: dict[str, str]) -> None:
    """Refuse a folder with changed files.

    Raises:
        BadInput: a file differs from the exported one.
    """
    for name, file in files.items():
        expected = digests.get(name)
        if expected is not None and sha256_of(file) != expected:
            raise BadInput(
                f"{name} was changed after the export",
                where=str(folder),
                fix="Export the model again.",
            )
