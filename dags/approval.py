"""The approval of a model by a person, if the deployment sets `CONFIDE_PROMOTE=approved`."""

from __future__ import annotations

from airflow.sdk import BaseOperator

from dags.names import NAMES

# The report passes only names, ids and public figures to this text.
_VERDICTS = """
{% for model, sentence in ((ti.xcom_pull(task_ids='report') or {}).get('verdicts') or {}).items() %}
- **{{ model }}**: {{ sentence }}
{% else %}
This run made no model that could be promoted.
{% endfor %}

*Approve* gives the model's version in MLflow the alias `promotable`, unless an audit has
contradicted its claim in the meantime. *Reject* leaves it registered without the alias.
"""


def approval() -> BaseOperator:
    """Return the task that shows the report's verdicts and waits for an answer without limit."""
    from airflow.providers.standard.operators.hitl import ApprovalOperator

    return ApprovalOperator(
        task_id="approval",
        task_display_name=NAMES["approval"],
        subject="Promote the model of {{ dag_run.run_id }}?",
        body=_VERDICTS,
        doc_md="Shows the audits' verdict on the claim, and waits for a person to decide.",
    )
