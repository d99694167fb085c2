"""The inputs and results of steps, as versioned, frozen models.

The package imports only pydantic, `dp_core.config` and the standard library, so that Airflow parses
a DAG file in milliseconds.
"""
