"""The machine around a test: packages, terminals, and a separate systemd."""
