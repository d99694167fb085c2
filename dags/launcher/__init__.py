"""Launchers: Airflow tasks that run a step as a process, a container or a pod."""
