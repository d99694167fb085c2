"""What runs after what. The DAG files import only `airflow.sdk`, `dags.launcher` and `tasks.specs`."""
