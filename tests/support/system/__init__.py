"""The machine around a test: packages, terminals, and a systemd of its own."""
