"""How much does a model reveal about its training text?

This audit uses only the model's predictions. It measures the **exposure** of canaries,
**membership inference** (can an attacker distinguish texts that trained the model from texts that
did not?), and, for a causal model, the **extraction** of both. The model is the output of a
training step (its URI in the store) or a folder in Hugging Face's layout, trained by anyone. The
audit is the same as `confide audit`. Its findings are for the operator: they are logged to
MLflow's restricted experiment.

If the texts were divided in any other way than by **fair coins** before the training, the two
groups may differ for other reasons, and the audit refutes no claim. With fair coins, the audit
gives a lower bound on ε. If the bound contradicts the claim of a model of this deployment, the
claim is withdrawn and the task fails.
"""

from collections.abc import Mapping
from typing import Any

from airflow.sdk import dag

from dags.launcher.form import form, settings_from, with_form
from dags.launcher.step_operator import TRAINING, defaults, step
from dp_core.config.audit_settings import BlackBoxAuditConfig
from tasks.protocol.points import Point
from tasks.protocol.specs import PrivacyAuditSpec, StepSpec


def plan(params: Mapping[str, Any], point: Point | None) -> dict[str, StepSpec]:
    """Return the specs of this job's steps for a run's parameters."""
    settings = settings_from(BlackBoxAuditConfig, params)
    # None of the files is declared public.
    return {"privacy_audit": PrivacyAuditSpec(made_up=False, **settings.model_dump())}


@dag(
    dag_id="privacy_audit",
    dag_display_name="privacy_audit · attack one model by its predictions",
    description="A model from a run or a folder, with canaries and texts → privacy audit",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args=defaults(),
    tags=["confide", "differential privacy", "audit"],
    doc_md=__doc__,
)
def privacy_audit() -> None:
    """Define the graph, which has one step."""
    step("privacy_audit", plan=plan, pool=TRAINING)


with_form(privacy_audit(), form(BlackBoxAuditConfig))
