"""The report: model, tables, figures, page."""
