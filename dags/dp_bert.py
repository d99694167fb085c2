"""The DAG that follows Hoory et al. 2021: train a BERT on confidential text and measure it."""

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
    GiveBackSpec,
    JobSettings,
    PromoteSpec,
    StepSpec,
    SweepPoint,
    job_steps,
    kept_points,
    more_points,
    steps_of,
)


def plan(params: Mapping[str, Any], point: SweepPoint | None) -> dict[str, StepSpec]:
    """Return the specs of this job's steps for a run's parameters."""
    settings = launcher.settings_from(JobSettings, params)
    steps = job_steps(settings, configuration.promotion())
    if point is not None:
        return steps_of(point, steps)
    report = steps["report"]
    return {
        **steps,
        "promote": PromoteSpec(made_up=report.made_up, report_uri=report.output),
        "give_back": GiveBackSpec(made_up=report.made_up),
    }


step = partial(launcher.step, plan=plan)
training = partial(step, pool=TRAINING)
FINE_TUNING = "Fine-tunes the model on labels and scores it."
EXPOSURE = "Measures how well the model remembers its canaries."
MEMBERSHIP = "Attacks the model by membership inference."


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
### Train a BERT on confidential text under differential privacy, and measure its memorisation

The job follows *Hoory et al. 2021, Learning and Evaluating a Differentially Private Pre-trained
Language Model*: a **vocabulary** from a noised histogram (ε_V), **public pre-training**, **DP-SGD
pre-training** on the private rows (ε_T), **fine-tuning** for entities, classes or pairs (F1 or
accuracy), and the **exposure** of canaries planted among the private rows. For comparison, the job
measures the public-only model and a model trained without privacy in the same way.

The default settings use made-up notes. *Trigger* opens the form; invalid values are refused by the
form or by the first task. A task whose result exists already ends at once, and no release is
charged twice. The buttons *MLflow run* and *Report* on a task's page open the results.

To run the job on a schedule, set `CONFIDE_TRAIN_SCHEDULE` (cron) and `CONFIDE_TRAIN_SETTINGS` (a
JSON file). To run it on each new version of a corpus, use the DAG `new_corpus`.
""",
)
def dp_bert() -> None:
    """Define the graph; it reads from top to bottom like the paper's method section."""

    @task(
        retries=0,
        task_display_name=NAMES["settings"],
        doc_md="Checks the form's values again (Airflow accepts unknown keys) and that the files "
        "exist; lists the additional private trainings.",
    )
    def settings() -> list[dict[str, Any]]:
        checked = launcher.settings_to_start(JobSettings, get_current_context()["params"])
        return [point.model_dump() for point in more_points(checked)]

    # A run that does not fit its budget is refused before anything is read.
    budget = step("budget", doc_md="Records the sources; **refuses a run over the budget.**")

    # The data: confidential notes, public text, and labelled text.
    private_corpus = step("private_corpus", doc_md="Reads the notes and groups them by unit.")
    public_corpus = step("public_corpus", doc_md="Reads public text, which needs no privacy.")
    entities = step("entities", doc_md="Reads labelled text for training and test.")
    checkpoint = step("checkpoint", doc_md="Reads the tokens to keep from a public model.")
    points = settings()
    points >> budget >> [private_corpus, public_corpus, entities, checkpoint]

    # The whole run is charged only after text and labels have been read and checked.
    reserve = step(
        "reserve",
        trigger_rule=TriggerRule.NONE_FAILED,  # labels and checkpoint are optional
        doc_md="Registers ε_V and ε_T together: **either all of them fit, or the run ends.**",
    )
    [private_corpus, public_corpus, entities, checkpoint] >> reserve

    # The vocabulary consists of public words, which are free, and of private words that public
    # text lacks, chosen by noised counts: the first release (ε_V). Alternatively, the tokens of a
    # public model are kept.
    vocabulary = step(
        "vocabulary",
        doc_md="Learns tokens from public words and noised counts of private words. "
        "**Charged: ε_V.**",
    )
    reserve >> vocabulary

    # Canaries are drawn after the vocabulary, so that they cannot influence it, and are planted
    # by unit.
    canaries = step("canaries", doc_md="Draws canaries from the vocabulary with public coins.")
    private_store = step("private_store", doc_md="Writes private rows of tokens with canaries.")
    public_store = step("public_store", doc_md="Writes public rows of token ids.")
    vocabulary >> canaries >> private_store
    [vocabulary, public_corpus] >> public_store

    # Phrases that many units share, and text written from them, are optional and another release
    # (ε_P).
    phrases = step("phrases", doc_md="Counts phrases in rounds with noise. **Charged: ε_P.**")
    written_text = step(
        "written_text", doc_md="Writes text from released phrases, at no further privacy cost."
    )
    phrases_store = step("phrases_store", doc_md="Writes rows of tokens of the written text.")
    canaries >> phrases >> written_text >> phrases_store

    # Pre-training uses public text, then private rows with DP-SGD: the second release (ε_T).
    # A model without privacy is trained for comparison; it stays with the operator.
    public_pretraining = training(
        "public_pretraining", doc_md="Trains the language model on public text."
    )
    phrases_pretraining = training(
        "phrases_pretraining", doc_md="Continues the training on the written text."
    )
    dp_pretraining = training(
        "dp_pretraining",
        trigger_rule=TriggerRule.NONE_FAILED,  # phrases are optional
        doc_md="Continues the training on private rows with DP-SGD. **Charged: ε_T.**",
    )
    nonprivate_pretraining = training(
        "nonprivate_pretraining",
        doc_md="Trains on the same rows without privacy; the model is never exported.",
    )
    [public_store, private_store] >> public_pretraining
    [public_pretraining, phrases_store] >> phrases_pretraining
    [public_pretraining, phrases_pretraining] >> dp_pretraining
    public_pretraining >> nonprivate_pretraining

    # Each model is measured by its usefulness (strict entity F1, or accuracy), its memorisation
    # (exposure) and, optionally, membership inference against units that were held out.
    measured = []
    for mode, model in {
        "public": public_pretraining,
        "phrases": phrases_pretraining,
        "dp": dp_pretraining,
        "nonprivate": nonprivate_pretraining,
    }.items():
        finetuning = training(f"{mode}_finetuning", doc_md=FINE_TUNING)
        exposure = training(f"{mode}_exposure", doc_md=EXPOSURE)
        membership = training(f"{mode}_membership", doc_md=MEMBERSHIP)
        [model, entities] >> finetuning
        model >> [exposure, membership]
        measured += [finetuning, exposure, membership]

    # Additional private trainings, for example from random weights, are separate releases.
    @task_group
    def more(coordinates: dict[str, Any]) -> None:
        named = {"point": coordinates, "map_index_template": "{{ point_name }}"}
        model = training(
            "dp_pretraining",
            doc_md="Trains another model with DP-SGD. **Charged: ε_T.**",
            trigger_rule=TriggerRule.NONE_FAILED,
            **named,
        )
        model >> [
            training("dp_finetuning", doc_md=FINE_TUNING, **named),
            training("dp_exposure", doc_md=EXPOSURE, **named),
            training("dp_membership", doc_md=MEMBERSHIP, **named),
        ]

    every_training = more.expand(coordinates=points)
    [public_pretraining, phrases_pretraining, entities] >> every_training

    # Both trainings may keep models of earlier epochs, which their one charge covers. Membership
    # inference attacks them together with the last model.
    @task(
        retries=0,
        task_display_name=NAMES["kept_models"],
        doc_md="Lists the models that trainings keep after the epochs in `kept_epochs`.",
    )
    def kept_models() -> list[dict[str, Any]]:
        settings = launcher.settings_from(JobSettings, get_current_context()["params"])
        return [point.model_dump() for point in kept_points(settings)]

    @task_group
    def kept(coordinates: dict[str, Any]) -> None:
        for name, description in {"finetuning": FINE_TUNING, "exposure": EXPOSURE}.items():
            training(
                name,
                point=coordinates,
                map_index_template="{{ point_name }}",
                trigger_rule=TriggerRule.NONE_FAILED,  # the comparison is optional
                doc_md=description,
            )

    kept_epochs = kept_models()
    points >> kept_epochs
    every_kept = kept.expand(coordinates=kept_epochs)
    [dp_pretraining, nonprivate_pretraining, entities] >> every_kept

    # One-run audit: guess which canaries fair coins had put into the training.
    audit = training("dp_audit", doc_md="Estimates a lower bound on the DP model's ε.")
    dp_pretraining >> audit
    measured.append(audit)

    report = step(
        "report",
        trigger_rule=TriggerRule.NONE_FAILED,  # the comparison is optional
        doc_md="Writes one page with ε_V, ε_T, F1, exposure and the privacy statement, and "
        "registers the model with the audits' verdict. **Fails if an audit contradicts the "
        "claim.**",
    )
    [*measured, every_training, every_kept] >> report

    # A run that fails before its first release gives its planned budget back.
    give_back = step("give_back", doc_md="Frees the planned budget if no release has begun.")
    report >> give_back.as_teardown(setups=reserve) >> launcher.outcome("report")

    # The report has judged the model by its audits and registered it. The deployment may require
    # that a person approves the promotion.
    if configuration.promotion() == "approved":
        promote = step("promote", doc_md="Gives the model the alias `promotable`.")
        report >> approval() >> promote


launcher.with_form(dp_bert(), launcher.form(JobSettings, configuration.settings("TRAIN")))
