"""Configuration models, one per concern: each setting's type, range, default and help, once.

The trigger form, the command line, the specs of the steps and the algorithms share them. They
import pydantic and `dp_core.errors` alone, so that a DAG file can be read in milliseconds.
"""
