"""One module per command, or per group of related commands; `base` has their shared code."""
