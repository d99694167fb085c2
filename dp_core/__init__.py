"""The shared algorithms of Confide: they know neither Airflow nor MLflow nor Docker."""
