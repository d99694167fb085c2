"""The stack without Docker: Airflow and MLflow as processes of this machine, on loopback only."""
