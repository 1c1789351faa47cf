"""The command line: a thin skin of verbs over the rooms, and the one place (`wiring`) that builds them."""
