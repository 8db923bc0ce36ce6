"""Scenario files (tests/scenarios): their commands, and the text of what the core does."""
