"""What alembic runs for each command: the revisions, on the connection that it was handed."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table="ledger_alembic_version",  # MLflow's or Airflow's may be in the same database
)
context.run_migrations()
