"""The report of a job or sweep: data model, tables, figures and HTML page."""
