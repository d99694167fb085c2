"""A person's approval, where the deployment asks for it (`CONFIDE_PROMOTE=approved`)."""

from __future__ import annotations

from airflow.sdk import BaseOperator

from dags.names import NAMES

# Names, ids and public figures alone: the report tells no other.
_VERDICTS = """
{% for model, sentence in ((ti.xcom_pull(task_ids='report') or {}).get('verdicts') or {}).items() %}
- **{{ model }}**: {{ sentence }}
{% else %}
This run made no model that could be promoted.
{% endfor %}

*Approve* gives the model's version in MLflow the alias `promotable`, unless an audit has
contradicted its claim meanwhile. *Reject* leaves it registered without the alias.
"""


def approval() -> BaseOperator:
    """Return the task that shows the report's verdicts and waits, as long as it takes."""
    from airflow.providers.standard.operators.hitl import ApprovalOperator

    return ApprovalOperator(
        task_id="approval",
        task_display_name=NAMES["approval"],
        subject="Promote the model of {{ dag_run.run_id }}?",
        body=_VERDICTS,
        doc_md="Shows what the audits leave of the claim, and waits for a person.",
    )
