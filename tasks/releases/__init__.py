"""Releases of private data: plans, charges, provenance, statements."""
