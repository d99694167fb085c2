"""The way of metrics to MLflow."""
