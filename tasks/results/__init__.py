"""Results of finished steps, which later steps, the report and the evidence read."""
