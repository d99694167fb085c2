"""Hoory et al. 2021, end to end: a BERT of confidential text, and what it remembers of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from airflow.sdk import TriggerRule, dag, get_current_context, task, task_group

from dags import configuration, launcher
from dags.approval import approval
from dags.launcher import TRAINING
from dags.names import NAMES
from tasks.protocol import (
    JobSettings,
    StepSpec,
    SweepPoint,
    dp_bert_steps,
    give_back_spec,
    kept_points,
    more_points,
    promote_spec,
    steps_of,
)


def plan(params: Mapping[str, Any], point: SweepPoint | None) -> dict[str, StepSpec]:
    """Return the specs of this job's steps for a run's parameters."""
    settings = launcher.settings_from(JobSettings, params)
    steps = dp_bert_steps(settings, configuration.promotion())
    if point is not None:
        return steps_of(point, steps)
    report = steps["report"]
    return {
        **steps,
        "promote": promote_spec(report),
        "give_back": give_back_spec(made_up=report.made_up),
    }


step = partial(launcher.step, plan=plan)
training = partial(step, pool=TRAINING)


@dag(
    dag_id="dp_bert",
    dag_display_name="dp_bert · train privately, then measure",
    description="Private corpus → DP vocabulary → DP pre-training → fine-tuning and exposure",
    schedule=configuration.schedule("TRAIN"),
    catchup=False,
    max_active_runs=1,
    default_args=launcher.defaults(),
    tags=["confide", "differential privacy", "training"],
    doc_md="""
### Train a BERT on confidential text under differential privacy, and measure what it keeps

Follows *Hoory et al. 2021, Learning and Evaluating a Differentially Private Pre-trained Language
Model*: a **vocabulary** from a noised histogram (ε_V), **public pre-training**, **DP-SGD
pre-training** on the private rows (ε_T), **fine-tuning** for entities, classes or pairs (F1 or
accuracy), and the **exposure** of canaries planted among the private rows. The same is measured for
the public-only model and, for comparison, for one trained without privacy.

The defaults run on made-up notes. *Trigger* opens the form; wrong values are refused there or by
the first task. A task whose result is there already answers at once, and nothing is charged twice.
Results: the buttons *MLflow run* and *Report* on a task's page lead there.

By schedule: `CONFIDE_TRAIN_SCHEDULE` (cron) and `CONFIDE_TRAIN_SETTINGS` (a JSON file). On a new
version of a corpus: the DAG `new_corpus`.
""",
)
def dp_bert() -> None:
    """Describe the job: read from top to bottom like the paper's method section."""

    @task(
        retries=0,
        task_display_name=NAMES["settings"],
        doc_md="Checks the form's values again (Airflow lets unknown keys through), and that the "
        "files are there; lays out the further private trainings.",
    )
    def settings() -> list[dict[str, Any]]:
        told = launcher.settings_to_start(JobSettings, get_current_context()["params"])
        return [point.model_dump() for point in more_points(told)]

    # A run that its budget does not hold is refused before anything is read.
    budget = step("budget", doc_md="Records the sources; **refuses a run that does not fit.**")

    # The data: confidential notes, public text, and labelled text.
    private_corpus = step("private_corpus", doc_md="Reads the notes and groups them by unit.")
    public_corpus = step("public_corpus", doc_md="Reads public text; it needs no privacy.")
    entities = step("entities", doc_md="Reads labelled text: training and test.")
    checkpoint = step("checkpoint", doc_md="The tokens of a public model that are kept.")
    points = settings()
    points >> budget >> [private_corpus, public_corpus, entities, checkpoint]

    # Text and labels have been read and checked: only now is the whole run charged.
    reserve = step(
        "reserve",
        trigger_rule=TriggerRule.NONE_FAILED,  # there may be no labels, and no checkpoint
        doc_md="Registers ε_V and ε_T together: **all of it fits, or none.**",
    )
    [private_corpus, public_corpus, entities, checkpoint] >> reserve

    # The vocabulary: public words, which are free, and noised counts of private ones that public
    # text lacks, the first release (ε_V). Or a public model's own tokens, if they are kept.
    vocabulary = step(
        "vocabulary", doc_md="Public and noised private words → tokens. **Charged: ε_V.**"
    )
    reserve >> vocabulary

    # Canaries are drawn after the vocabulary, so they cannot shape it, and planted by unit.
    canaries = step("canaries", doc_md="Draws canaries from the vocabulary with public coins.")
    private_store = step("private_store", doc_md="Private rows of token ids, canaries planted.")
    public_store = step("public_store", doc_md="Public rows of token ids.")
    vocabulary >> canaries >> private_store
    [vocabulary, public_corpus] >> public_store

    # Phrases that many units share, and text written from them: optional, a release too (ε_P).
    phrases = step("phrases", doc_md="Noised counts of phrases, in rounds. **Charged: ε_P.**")
    written_text = step("written_text", doc_md="Text from released phrases; it costs nothing more.")
    phrases_store = step("phrases_store", doc_md="Rows of token ids of the written text.")
    canaries >> phrases >> written_text >> phrases_store

    # Pre-training: on public text, then on private rows with DP-SGD: the second release (ε_T).
    # Without privacy too, for comparison; that model stays with the operator.
    public_pretraining = training("public_pretraining", doc_md="Masked language model, public.")
    phrases_pretraining = training("phrases_pretraining", doc_md="From there, on written text.")
    dp_pretraining = training(
        "dp_pretraining",
        trigger_rule=TriggerRule.NONE_FAILED,  # the phrases may have been switched off
        doc_md="DP-SGD from there. **Charged: ε_T.**",
    )
    nonprivate_pretraining = training(
        "nonprivate_pretraining", doc_md="The same rows without privacy; never exported."
    )
    [public_store, private_store] >> public_pretraining
    [public_pretraining, phrases_store] >> phrases_pretraining
    [public_pretraining, phrases_pretraining] >> dp_pretraining
    public_pretraining >> nonprivate_pretraining

    # What the models are good for (strict entity F1, or accuracy), what they remember (exposure),
    # and, where settings ask for it, whether units that trained can be told from those held out.
    measured = []
    for mode, model in {
        "public": public_pretraining,
        "phrases": phrases_pretraining,
        "dp": dp_pretraining,
        "nonprivate": nonprivate_pretraining,
    }.items():
        finetuning = training(f"{mode}_finetuning", doc_md="Learns labels, and is scored.")
        exposure = training(f"{mode}_exposure", doc_md="How well it remembers its canaries.")
        membership = training(f"{mode}_membership", doc_md="Whether it gives its members away.")
        [model, entities] >> finetuning
        model >> [exposure, membership]
        measured += [finetuning, exposure, membership]

    # Further private trainings, each a release of its own: say from random weights.
    @task_group
    def more(coordinates: dict[str, Any]) -> None:
        named = {"point": coordinates, "map_index_template": "{{ point_name }}"}
        model = training(
            "dp_pretraining",
            doc_md="Another private training. **Charged: ε_T.**",
            trigger_rule=TriggerRule.NONE_FAILED,
            **named,
        )
        model >> [
            training("dp_finetuning", doc_md="Learns labels, and is scored.", **named),
            training("dp_exposure", doc_md="How well it remembers its canaries.", **named),
            training("dp_membership", doc_md="Whether it gives its members away.", **named),
        ]

    every_training = more.expand(coordinates=points)
    [public_pretraining, phrases_pretraining, entities] >> every_training

    # Models that both trainings kept after earlier epochs, covered by their one charge. Membership
    # is tried on them together with the last.
    @task(
        retries=0,
        task_display_name=NAMES["kept_models"],
        doc_md="Lays out the models that trainings keep after the epochs that `kept_epochs` names.",
    )
    def kept_models() -> list[dict[str, Any]]:
        told = launcher.settings_from(JobSettings, get_current_context()["params"])
        return [point.model_dump() for point in kept_points(told)]

    @task_group
    def kept(coordinates: dict[str, Any]) -> None:
        for name, words in {
            "finetuning": "Learns labels, and is scored.",
            "exposure": "How well it remembers its canaries.",
        }.items():
            training(
                name,
                point=coordinates,
                map_index_template="{{ point_name }}",
                trigger_rule=TriggerRule.NONE_FAILED,  # the comparison may have been switched off
                doc_md=words,
            )

    kept_epochs = kept_models()
    points >> kept_epochs
    every_kept = kept.expand(coordinates=kept_epochs)
    [dp_pretraining, nonprivate_pretraining, entities] >> every_kept

    # Which of the canaries were in its training, that were put in or left out by coins.
    audit = training("dp_audit", doc_md="A lower bound on ε by the DP model, and a verdict.")
    dp_pretraining >> audit
    measured.append(audit)

    report = step(
        "report",
        trigger_rule=TriggerRule.NONE_FAILED,  # the comparison may have been switched off
        doc_md="One page: ε_V, ε_T, F1, exposure, and the privacy statement. **Fails if an audit "
        "contradicts the claim**; the model is registered with the verdict.",
    )
    [*measured, every_training, every_kept] >> report

    # A run that failed before its first release leaves nothing planned.
    give_back = step("give_back", doc_md="If no release has begun, the budget is free again.")
    report >> give_back.as_teardown(setups=reserve)

    # Behind the gate: the report has judged the model by its audits and registered it. Whether it
    # is promoted, a person may have to say.
    if configuration.promotion() == "approved":
        promote = step("promote", doc_md="Gives the model the alias `promotable`.")
        report >> approval() >> promote


launcher.with_form(dp_bert(), launcher.form(JobSettings, configuration.settings("TRAIN")))
