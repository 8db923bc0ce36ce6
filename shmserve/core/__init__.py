"""All scheduling decisions of the server, without I/O or a clock: events in, effects out. The map of its packages is in
docs/architecture.md, "Inside the core"."""
