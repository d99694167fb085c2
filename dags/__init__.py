"""The DAG files. They import only `airflow.sdk`, `dags.launcher` and `tasks.protocol`."""
