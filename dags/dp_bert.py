"""Train a BERT on confidential text under differential privacy, and measure its memorisation.

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
"""

from airflow.sdk import dag

from dags.experiment import RunPlan, experiment
from dags.launcher.form import form, form_defaults, schedule, with_form
from dags.launcher.outcome import approval, outcome
from dags.launcher.step_operator import defaults, step
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import promotion

PLAN = RunPlan(JobSettings)


@dag(
    dag_id="dp_bert",
    dag_display_name="dp_bert · train privately, then measure",
    description="Private corpus → DP vocabulary → DP pre-training → fine-tuning and exposure",
    schedule=schedule("TRAIN"),
    catchup=False,
    max_active_runs=1,
    default_args=defaults(),
    tags=["confide", "differential privacy", "training"],
    doc_md=__doc__,
)
def dp_bert() -> None:
    """Define the graph; `dags/experiment.py` reads like the paper's method section."""
    drawn = experiment(PLAN)
    with drawn.reporting:
        drawn.last >> outcome(PLAN.last_task)

        # The report has judged the model by its audits and registered it. The deployment may
        # require that a person approves the promotion.
        if promotion() == "approved":
            promote = step("promote", plan=PLAN.of_run)
            drawn.report >> approval() >> promote


with_form(dp_bert(), form(JobSettings, form_defaults("TRAIN")))
