"""The interface of orchestrator and steps: JSON specs, their hashes, and valid settings."""

import inspect
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dp_core.config.fields import IN_WORDS, one_line
from dp_core.errors import PlanError
from tasks.protocol.job import POINT_STEPS, budget_of_run, job_steps, point_steps
from tasks.protocol.points import OF_JOB, Mode, Point
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import (
    BudgetSpec,
    ChargedPrivacyConfig,
    Need,
    PretrainSpec,
    RunContext,
    SelectSpec,
    StepSpec,
    VocabularySpec,
)
from tasks.protocol.step_classes import STEP_CLASSES, spec_from_json
from tasks.protocol.sweep import SweepSettings
from tasks.releases.charge import plans_of

WHOLE = JobSettings(
    phrases_epsilon=2.0, membership_units=50, audit_canaries=40
)  # with every optional step switched on
STEPS = job_steps(WHOLE)
CHANGED, REFUSED = (
    tomllib.loads(Path(__file__).with_name(f"{name}_settings.toml").read_text())
    for name in ("changed", "refused")
)
BASES = REFUSED["bases"]
PRIVATE_LABELS, PRIVATE_PAIRS, NOTES = (BASES[name] for name in ("labels", "pairs", "notes"))


def _uris(spec: StepSpec) -> list[str]:
    uris = [
        v for k, v in spec.model_dump().items() if k.endswith("_uri") and isinstance(v, str) and v
    ]
    results = spec.model_dump().get("results", {})
    return uris + [uri for uri in results.values() if isinstance(uri, str)]


@pytest.mark.parametrize("name", list(STEPS))
def test_spec_round_trips_through_json_and_refuses_unknown_fields(name):
    assert spec_from_json(STEPS[name].model_dump_json()).digest() == STEPS[name].digest()
    body = json.loads(STEPS[name].model_dump_json()) | {"surprise": 1}
    with pytest.raises(ValidationError) as refused:
        spec_from_json(json.dumps(body))
    assert "surprise: unknown setting" in one_line(refused.value)


def test_steps_of_a_job_are_listed_after_their_inputs():
    done: set[str] = set()
    for spec in STEPS.values():
        assert set(_uris(spec)) <= done
        done.add(spec.output)
    assert len(done) == len(STEPS) and next(iter(STEPS)) == "budget"


def _another(schema: dict[str, Any], value: Any) -> Any:
    """Return another value of a setting, within its range."""
    choices = schema.get("enum") or ([True, False] if schema["type"] == "boolean" else [])
    most = schema.get("exclusiveMaximum", schema.get("maximum", math.inf))
    other = value * 2 if value else 7
    if isinstance(other, float | int) and other >= most:
        other = (value or most) / 2
    return next((v for v in choices if v != value), other)


CONCERNS = [c for c in SweepSettings.__mro__ if c.__module__.startswith("dp_core.config")]
STATED = [name for concern in CONCERNS for name in inspect.get_annotations(concern)]


def _descendants(kind: type[StepSpec]) -> set[type[StepSpec]]:
    return set().union(*({c, *_descendants(c)} for c in kind.__subclasses__()))


def test_every_setting_is_declared_by_one_configuration_model():
    """Forms, settings and specs inherit its type, range, default and help text."""
    stated = set(STATED) - {"model_config"}
    assert len(STATED) == len(set(STATED))
    settings_and_specs = {*SweepSettings.__mro__, *_descendants(StepSpec), ChargedPrivacyConfig}
    for model in settings_and_specs - set(CONCERNS):
        assert not stated & set(inspect.get_annotations(model)), model
    form = SweepSettings.model_json_schema()["properties"]
    assert stated <= set(form)
    changes: dict[str, Any] = {"selection": "random-count"}
    for name, field in SweepSettings.model_fields.items():
        if field.exclude_if:  # a younger setting, which specs omit at its default
            changes |= CHANGED["alone"].get(name) or {name: _another(form[name], field.default)}
    settings = SweepSettings.model_validate(changes)
    specs = [*STEPS.values(), *point_steps(settings, settings.points()[0]).values()]
    assert stated <= {name for spec in specs for name in _names(spec.model_dump())}


def _names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set().union(*map(_names, value)) if isinstance(value, tuple | list) else set()


def test_further_private_trainings_are_separate_charged_releases():
    more = "noise_multiplier=3; private_start=fresh; noise_multiplier=3, private_start=fresh"
    settings = JobSettings(more_trainings=more)
    steps, alone = job_steps(settings), job_steps(JobSettings())
    assert alone.keys() < steps.keys()
    for name in alone.keys() - {"budget", "reserve", "report"}:
        assert steps[name] == alone[name]
    trained = [spec for spec in steps.values() if isinstance(spec, PretrainSpec) and spec.plan]
    first, noisier, fresh, noisier_fresh = trained
    assert (first.init_uri, fresh.init_uri) == (steps["Public text only / pretraining"].output, "")
    assert first.plan == fresh.plan and noisier.init_uri == first.init_uri
    assert noisier.plan and noisier.plan.noise_multiplier == 3
    assert (noisier_fresh.plan, noisier_fresh.init_uri) == (noisier.plan, "")
    budget = steps["budget"]
    assert [spec for spec in budget.charged if isinstance(spec, PretrainSpec)] == trained
    nonprivate = job_steps(JobSettings(private_start="fresh"))["Without privacy / pretraining"]
    assert isinstance(nonprivate, PretrainSpec) and nonprivate.init_uri == ""


def test_further_private_trainings_count_for_delta():
    two = {"delta": 1 / 15_000, "vocabulary_source": "public", "more_trainings": "epochs=2"}
    plans_of(budget_of_run(JobSettings.model_validate(two)).charged, {})
    three = JobSettings.model_validate(two | {"more_trainings": "epochs=2; epochs=3"})
    with pytest.raises(PlanError, match="publishing one unit whole"):
        plans_of(budget_of_run(three).charged, {})


@pytest.mark.parametrize("field", sorted(set(JobSettings.model_fields) - set(CHANGED["elsewhere"])))
def test_every_setting_changes_the_hash_of_a_step(field):
    """A setting that changed no hash would return the results of another setting."""
    changed: dict[str, dict[str, Any]] = CHANGED["alone"] | {
        "target_epsilon": CHANGED["alone"]["target_epsilon"] | {"noise_multiplier": None}
    }
    default = WHOLE
    value = getattr(default, field)
    schema = JobSettings.form_schema()[field]
    change = changed.get(field) or {field: _another(schema, value)}
    steps = job_steps(JobSettings.model_validate(default.model_dump() | change))
    before = {n: s.digest() for n, s in STEPS.items() if n != "report"}
    after = {n: s.digest() for n, s in steps.items() if n != "report"}
    assert before != after


@pytest.mark.parametrize("case", CHANGED["dependent"])
def test_dependent_settings_change_the_hash_of_the_training(case):
    together, changed = BASES.get(case.get("of"), {}) | case.get("with", {}), case["change"]
    first, second = (
        job_steps(JobSettings.model_validate(settings))
        for settings in (together, {**together, **changed})
    )
    before, after = (
        [steps[name].digest() for name in ("With DP / pretraining", "With DP / finetuning")]
        for steps in (first, second)
    )
    assert before != after
    # The public model's fine-tuning depends on these settings too.
    shared = {"entities_patients", "entity_types", "class_names", "head"}
    same = not shared & set(changed)
    tuned = [steps["Public text only / finetuning"].digest() for steps in (first, second)]
    assert (tuned[0] == tuned[1]) is same
    assert first["vocabulary"].digest() == second["vocabulary"].digest()


@pytest.mark.parametrize("together", [{}, PRIVATE_LABELS, {"model_kind": "gpt2"}])
@pytest.mark.parametrize("field", sorted(JobSettings.model_fields))
def test_accepted_settings_make_valid_specs(field, together):
    """Otherwise an accepted form would fail later with a traceback."""
    schema = JobSettings.model_json_schema()["properties"][field]
    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    values = [schema[limit] + nudge for limit in limits if limit in schema for nudge in (0, 1e-9)]
    for value in [*schema.get("enum", []), *values, 5]:
        try:
            settings = JobSettings.model_validate({**together, field: value})
        except ValidationError:
            continue
        for spec in job_steps(settings).values():
            assert spec_from_json(spec.model_dump_json()) == spec


def test_only_membership_steps_read_the_table_of_codes():
    notes: dict[str, Any] = {**NOTES, "membership_units": 10, "nonprivate": True}
    without = job_steps(JobSettings(**notes))
    steps = job_steps(JobSettings(**notes, membership_codes="/codes"))
    readers = {n for n, s in steps.items() if any(source.uri == "/codes" for source in s.sources)}
    assert readers == {f"{OF_JOB[mode]} / membership" for mode in ("public", "dp", "nonprivate")}
    for name in readers:
        assert steps[name].needs == {Need.SOURCES} and without[name].needs == frozenset()
    (codes,) = steps["With DP / membership"].sources
    assert (codes.public, codes.dataset) == (False, "notes")
    budget = steps["budget"]
    assert isinstance(budget, BudgetSpec) and codes in budget.reads
    assert steps["With DP / pretraining"].digest() == without["With DP / pretraining"].digest()


def test_checkpoint_settings_change_no_hash():
    """Otherwise a longer time box would be charged as another release."""
    changes: dict[str, Any] = {"checkpoint_every": 7, "time_box_minutes": 30.0}
    more = JobSettings(phrases_epsilon=2.0, audit_canaries=40, **changes)
    steps = job_steps(more)
    kept = steps["With DP / pretraining"]
    assert kept.training.model_dump().items() >= changes.items()
    tuned = steps["With DP / finetuning"].training  # the time of a stop would reveal its sentences
    assert (tuned.checkpoint_every, tuned.time_box_minutes) == (7, 0.0)
    for name, spec in steps.items():
        if name != "report":
            assert spec.digest() == STEPS[name].digest()


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind in ("job", "sweep") for case in REFUSED[kind]]
)
def test_contradictory_settings_are_refused_with_the_reason(kind, case):
    settings: dict[str, Any] = {}
    for name in case.get("of", ()):
        settings |= BASES[name]
    with pytest.raises(ValidationError) as refused:
        {"job": JobSettings, "sweep": SweepSettings}[kind].model_validate(
            settings | case.get("set", {})
        )
    line = one_line(refused.value)
    assert re.search(case["reason"], line), line
    assert "\n" not in line
    assert not line.startswith("settings: ")  # the caller adds the name of the source


def test_order_of_class_names_does_not_change_their_ids():
    tuned = [
        job_steps(JobSettings.model_validate(PRIVATE_PAIRS | {"class_names": names}))
        for names in ("yes,no,maybe", "maybe, yes,no,yes")
    ]
    for steps in tuned:
        spec = steps["With DP / finetuning"]
        assert spec.label_names == spec.class_names == ("maybe", "no", "yes")
        assert spec.entity_types == ()


@pytest.mark.cases
def test_private_labels_are_charged_to_the_notes_or_to_a_separate_data_set(base, more):
    settings = JobSettings.model_validate({**BASES[base], **NOTES, **more})
    assert settings.entities_charged_to == more.get("entities_dataset", "notes")


def test_every_pattern_and_description_is_understandable_without_context():
    """The command line shows descriptions without the form's titles and order."""
    schema = SweepSettings.model_json_schema()["properties"]
    assert {field["pattern"] for field in schema.values() if "pattern" in field} == set(IN_WORDS)
    for name, field in SweepSettings.model_fields.items():
        description = field.description or ""
        assert len(description.split()) > 2, name
        assert not description.startswith(("As above", "Peak,", "Peak.", "Its own", "Of ")), name


def test_random_count_selection_is_one_charged_point():
    folds: dict[str, Any] = {"sweep_finetune_epochs": "1,2", "vocabulary_source": "public"}
    folds |= {"entities_folds": 3, **NOTES, "entities_format": "i2b2", "entities_train": "/x"}
    tuned = SweepSettings(selection="random-count", **folds)
    assert [type(charged) for charged in budget_of_run(tuned).charged] == [SelectSpec]
    assert len(tuned.points()) == 2 * 3
    settings = SweepSettings(selection="random-count", sweep_noise_multipliers="1,2,4")
    (point,) = settings.points()
    assert Point.model_validate(json.loads(json.dumps(point.model_dump()))) == point
    steps = point_steps(settings, point)
    selection = steps["pretraining"]
    assert len(selection.candidates) == len(settings.grid()) == 3 * 2 * 2
    assert spec_from_json(selection.model_dump_json()).digest() == selection.digest()
    other = point_steps(settings.model_copy(update={"selection_mean": 9.0}), point)
    assert other["pretraining"].digest() != selection.digest()
    budget = budget_of_run(settings)
    assert [type(charged) for charged in budget.charged] == [VocabularySpec, SelectSpec]
    source = {"private_format": "jsonl", "private_path": "/private", "private_dataset": "notes"}
    private = settings.model_copy(update=source)
    of_point = point_steps(private, point)
    report = job_steps(private)["report"]
    assert any(spec.hides_count for spec in of_point.values()) and report.hides_count
    assert not any(spec.hides_count for spec in steps.values())  # made-up data
    published = private.model_copy(update={"selection": "publish-all"})
    assert not any(spec.hides_count for spec in job_steps(published).values())
    SweepSettings(time_box_minutes=30)


def test_spec_contains_no_field_of_the_run():
    spec = STEPS["vocabulary"]
    assert not set(RunContext.model_fields) & set(spec.model_dump())


def test_points_of_a_sweep_share_every_step_before_training():
    settings = SweepSettings(
        sweep_noise_multipliers="1,2", sweep_batch_sizes="64", sweep_epochs="1", phrases_epsilon=2.0
    )
    first, second = (point_steps(settings, p) for p in settings.points())
    separate = {"pretraining", "finetuning", "exposure"}
    assert {n for n in first if first[n].output != second[n].output} == separate
    assert set(job_steps(settings)["report"].points) == {p.name for p in settings.points()}


def test_membership_attacks_use_the_public_model_as_reference_and_are_optional():
    public = STEPS["Public text only / pretraining"].output
    modes: tuple[Mode, ...] = ("public", "dp", "nonprivate")
    for mode, of_mode in zip(modes, [(), (public,), (public,)], strict=True):
        spec = STEPS[f"{OF_JOB[mode]} / membership"]
        assert spec.model_uri == STEPS[f"{OF_JOB[mode]} / pretraining"].output
        assert spec.reference_uris == of_mode
    without = job_steps(WHOLE.model_copy(update={"membership_units": 0}))
    left = {name for name in STEPS if name.endswith("/ membership")}
    assert set(STEPS) - set(without) == left and len(left) == 4
    for name in without:
        assert name == "report" or without[name].digest() == STEPS[name].digest()


def test_extraction_settings_reach_the_training_spec_without_changing_its_hash():
    without = JobSettings(model_kind="gpt2")
    first, second = (
        job_steps(without.model_copy(update={"extraction_rows": rows})) for rows in (0, 9)
    )
    changed = {name for name in first if first[name].output != second[name].output} - {"report"}
    assert changed == {f"{OF_JOB[mode]} / exposure" for mode in ("public", "dp", "nonprivate")}
    for name in ("With DP / pretraining", "With DP / exposure"):
        assert second[name].model_dump()["extraction"]["extraction_rows"] == 9
    JobSettings(extraction_rows=0, extraction_prefix=21)


def test_audit_canaries_change_training_and_budget_together():
    without, audit = JobSettings(), STEPS["With DP / audit"]
    declared, batch = without.declared_units, without.batch_size
    assert WHOLE.updates == math.ceil(without.epochs * (declared + 40) / batch) > without.updates
    compared = [s.updates_after("nonprivate", s.epochs) for s in (WHOLE, without)]
    assert compared[0] == compared[1]
    assert "With DP / audit" not in job_steps(without)
    model = STEPS["With DP / pretraining"]
    assert (audit.model_uri, audit.start_uri) == (model.output, model.init_uri)
    assert model.plan is not None and model.plan.audit_canaries == 40
    assert audit.needs == {Need.CHARGING} and not audit.sources  # it reads no external file
    with pytest.raises(ValidationError, match="only pre-training is audited"):
        tuned = STEPS["With DP / finetuning"].model_dump() | {"plan": model.plan.model_dump()}
        spec_from_json(json.dumps(tuned))
    with pytest.raises(ValidationError, match="only a training on private rows is audited"):
        public = STEPS["public_store"].model_dump() | {"audit_canaries": 40}
        spec_from_json(json.dumps(public))
    sweep = SweepSettings(audit_canaries=40)
    assert point_steps(sweep, sweep.points()[0]).keys() >= {"pretraining"}
    assert sweep.job(sweep.points()[0]).audit_canaries == 0


def test_delta_must_be_below_one_over_all_declared_units():
    near = {"delta": 1 / 6200, "declared_units": 6000, "vocabulary_source": "public"}
    plans_of(budget_of_run(JobSettings(**near)).charged, {})
    with pytest.raises(PlanError, match="1/6600"):
        plans_of(budget_of_run(JobSettings(audit_canaries=600, **near)).charged, {})


def test_only_public_or_made_up_data_is_shown():
    assert JobSettings().made_up
    assert not JobSettings.model_validate(NOTES).made_up
    assert JobSettings.model_validate(NOTES | {"all_public": True}).made_up
    labels = {"entities_format": "i2b2", "entities_train": "/x", "entities_test": "/y"}
    assert not JobSettings.model_validate(labels).made_up
    for more, shown in (({}, False), ({"entities_public": True}, True)):
        steps = job_steps(JobSettings.model_validate(labels | more))
        entities = steps["entities"]
        assert entities.public is shown


def test_job_without_phrases_omits_their_steps_and_keeps_other_hashes():
    without = job_steps(WHOLE.model_copy(update={"phrases_epsilon": 0.0}))
    of_model = (f"{OF_JOB['phrases']} / {task}" for task in POINT_STEPS if task != "audit")
    assert set(STEPS) - set(without) == {"phrases", "written_text", "phrases_store", *of_model}
    trained = (f"{OF_JOB[mode]} / pretraining" for mode in ("public", "nonprivate"))
    for name in ("vocabulary", "private_store", *trained):
        assert without[name].digest() == STEPS[name].digest()
    start, phrased = without["With DP / pretraining"], STEPS["With DP / pretraining"]
    assert start.init_uri == without["Public text only / pretraining"].output
    assert phrased.init_uri == STEPS["Released phrases only / pretraining"].output
    # Settings of phrases do not change the hashes of a job without phrases.
    other = job_steps(WHOLE.model_copy(update={"phrases_epsilon": 0.0, "phrases_per_unit": 7}))
    assert {n: s.digest() for n, s in without.items() if n != "report"} == {
        n: s.digest() for n, s in other.items() if n != "report"
    }


def test_phrases_are_charged_and_text_written_from_them_is_not():
    assert JobSettings(phrases_delta=1e-3)  # counts only with phrases
    assert STEPS["phrases"].needs == {Need.CHARGING, Need.CLUSTER}
    assert STEPS["written_text"].needs == frozenset()
    assert STEPS["Released phrases only / pretraining"].needs == {Need.CLUSTER}


def test_step_that_reads_files_from_outside_never_charges():
    for kind in STEP_CLASSES.values():
        if kind is not BudgetSpec:  # which computes digests of the files, and parses none
            assert not {Need.SOURCES, Need.CHARGING} <= kind.privileges, kind
