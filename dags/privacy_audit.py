"""One model, audited from outside by given canaries and texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import dag

from dags import launcher
from dags.launcher import TRAINING
from tasks.protocol import BlackBoxAuditConfig, StepSpec, SweepPoint, privacy_audit_spec


def plan(params: Mapping[str, Any], point: SweepPoint | None) -> dict[str, StepSpec]:
    """Return the specs of this job's steps for a run's parameters."""
    settings = launcher.settings_from(BlackBoxAuditConfig, params)
    return {"privacy_audit": privacy_audit_spec(settings)}


@dag(
    dag_id="privacy_audit",
    dag_display_name="privacy_audit · attack one model from outside",
    description="A model of a run, or anybody's, with canaries and texts → what it gives away",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args=launcher.defaults(),
    tags=["confide", "differential privacy", "audit"],
    doc_md="""
### What does a model give away?

The **exposure** of canaries, whether **texts that trained it** can be told from texts that did
not, and what of both **comes out** of a causal model, by its predictions alone: of a model of a run
here (its output's URI in the store), or of a folder in Hugging Face's layout, whoever trained it.
The same as `confide audit`, as a step by itself. What it finds is the operator's: the restricted
experiment of MLflow holds it.

Texts that were divided once may differ otherwise, and refute no claim. Texts that **fair coins**
divided before the training bound ε from below: what contradicts the claim of a model of this
deployment withdraws it, and fails the task.
""",
)
def privacy_audit() -> None:
    """Describe the audit: one step."""
    launcher.step(
        "privacy_audit",
        plan=plan,
        pool=TRAINING,
        doc_md="Reads model and files, and asks the model for its predictions.",
    )


launcher.with_form(privacy_audit(), launcher.form(BlackBoxAuditConfig))
