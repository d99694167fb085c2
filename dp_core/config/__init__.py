"""Configuration models, one per concern. They define each setting's type, range, default and help.

The trigger form, the command line, the specs of the steps and the algorithms share them. They
import only pydantic and `dp_core.errors`, so that a DAG file can be parsed in milliseconds.
"""
