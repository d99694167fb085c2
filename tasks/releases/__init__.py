"""What is released: plans, charges, provenance, statements."""
