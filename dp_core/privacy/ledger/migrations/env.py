"""Alembic's environment: run the revisions on the connection that the caller passes."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table="ledger_alembic_version",  # MLflow's or Airflow's may be in the same database
)
context.run_migrations()
