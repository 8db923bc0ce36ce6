"""One module for each command, or for commands that belong together; `base` is what they share."""
