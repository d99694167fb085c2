"""Batch plans by Apache Beam: on this machine, or on Dataflow, Flink or Spark."""
