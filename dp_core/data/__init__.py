"""Private text: readers, privacy units, token stores."""
