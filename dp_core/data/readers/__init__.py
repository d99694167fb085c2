"""Readers: a corpus, or text with entity labels, from the forms in which people have it."""
