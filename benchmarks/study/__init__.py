"""The study: the papers' experiments at a size that two cores train, three seeds each."""
