"""The DAG that follows Hoory et al. 2021: train a BERT on confidential text and measure it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from airflow.sdk import TriggerRule, dag, get_current_context, task

from dags import launcher
from dags.experiment import DESCRIPTIONS, each_point, front_half
from dags.launcher import TRAINING
from tasks.protocol import (
    GiveBackSpec,
    JobSettings,
    PromoteSpec,
    StepSpec,
    SweepPoint,
    job_steps,
    kept_points,
    more_points,
    point_steps,
    promotion,
)


def plan(params: Mapping[str, Any], point: SweepPoint | None) -> dict[str, StepSpec]:
    """Return the specs of this job's steps for a run's parameters."""
    settings = launcher.settings_from(JobSettings, params)
    if point is not None:
        return point_steps(settings, point)
    steps = job_steps(settings, promotion())
    report = steps["report"]
    return {
        **steps,
        "promote": PromoteSpec(made_up=report.made_up, report_uri=report.output),
        "give_back": GiveBackSpec(made_up=report.made_up),
    }


step = partial(launcher.step, plan=plan)
training = partial(step, pool=TRAINING)


@dag(
    dag_id="dp_bert",
    dag_display_name="dp_bert · train privately, then measure",
    description="Private corpus → DP vocabulary → DP pre-training → fine-tuning and exposure",
    schedule=launcher.schedule("TRAIN"),
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
        task_display_name="Check the settings",
        doc_md="Checks the form's values again (Airflow accepts unknown keys) and that the files "
        "exist; lists the additional private trainings.",
    )
    def settings() -> list[dict[str, Any]]:
        checked = launcher.settings_to_start(JobSettings, get_current_context()["params"])
        return [point.model_dump() for point in more_points(checked)]

    points = settings()
    front = front_half(points, plan, plan)
    public_pretraining, phrases_pretraining = front.public_pretraining, front.phrases_pretraining

    # DP-SGD continues the training on private rows: the second release (ε_T). A model without
    # privacy is trained for comparison; it stays with the operator.
    dp_pretraining = training(
        "dp_pretraining",
        trigger_rule=TriggerRule.NONE_FAILED,  # phrases are optional
        doc_md="Continues the training on private rows with DP-SGD. **Charged: ε_T.**",
    )
    nonprivate_pretraining = training(
        "nonprivate_pretraining",
        doc_md="Trains on the same rows without privacy; the model is never exported.",
    )
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
        of_model = {
            task: training(f"{mode}_{task}", doc_md=DESCRIPTIONS[task])
            for task in ("finetuning", "exposure", "membership")
        }
        model >> list(of_model.values())
        front.entities >> of_model["finetuning"]
        measured += of_model.values()

    # Additional private trainings, for example from random weights, are separate releases.
    every_training = each_point(
        "more",
        points,
        plan,
        "dp_finetuning",
        "dp_exposure",
        "dp_membership",
        training="dp_pretraining",
        rule=TriggerRule.NONE_FAILED,  # phrases are optional
    )
    [public_pretraining, phrases_pretraining, front.entities] >> every_training

    # Both trainings may keep models of earlier epochs, which their one charge covers. Membership
    # inference attacks them together with the last model.
    @task(
        retries=0,
        task_display_name="Lay out the kept models",
        doc_md="Lists the models that trainings keep after the epochs in `kept_epochs`.",
    )
    def kept_models() -> list[dict[str, Any]]:
        settings = launcher.settings_from(JobSettings, get_current_context()["params"])
        return [point.model_dump() for point in kept_points(settings)]

    kept_epochs = kept_models()
    points >> kept_epochs
    every_kept = each_point(
        "kept",
        kept_epochs,
        plan,
        "finetuning",
        "exposure",
        rule=TriggerRule.NONE_FAILED,  # the comparison is optional
    )
    [dp_pretraining, nonprivate_pretraining, front.entities] >> every_kept

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
    report >> give_back.as_teardown(setups=front.reserve) >> launcher.outcome("report")

    # The report has judged the model by its audits and registered it. The deployment may require
    # that a person approves the promotion.
    if promotion() == "approved":
        promote = step("promote", doc_md="Gives the model the alias `promotable`.")
        report >> launcher.approval() >> promote


launcher.with_form(dp_bert(), launcher.form(JobSettings, launcher.form_defaults("TRAIN")))
