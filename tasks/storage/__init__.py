"""The store: local folders and `gs://` behind one interface."""
