"""The DAG files. They import `airflow.sdk`, `dags.launcher` and `tasks.protocol` alone."""
