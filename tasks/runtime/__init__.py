"""The contract between a step and who starts it."""
