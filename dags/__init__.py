"""What runs after what: DAG files import `airflow.sdk`, `dags.launcher` and `tasks.specs` alone."""
