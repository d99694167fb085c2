"""One file per step: thin glue between a spec and `dp_core`, imported only when its step runs."""
