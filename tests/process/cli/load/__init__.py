"""The commands that put load on a server: bench and tune."""
