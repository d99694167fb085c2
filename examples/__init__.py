"""What no step uses yet."""
