"""One file per command of the CLI; each defines `command`."""
