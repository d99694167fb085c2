"""The step contract, and the processes in which the steps of a job run."""
