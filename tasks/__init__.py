"""The steps: `python -m tasks NAME --spec URI` is their whole contract with the outside."""
