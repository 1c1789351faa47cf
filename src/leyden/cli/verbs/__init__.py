"""One file per verb: `HELP` is its help text, `command` its function."""
