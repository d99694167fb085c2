"""Results of finished steps, as later steps, the report and the evidence read them."""
