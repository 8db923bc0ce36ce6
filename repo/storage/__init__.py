"""Repositories on disk: their layout, changes in them, and the files of loaded versions."""
