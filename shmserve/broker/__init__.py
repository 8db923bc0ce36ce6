"""The broker's process: it connects the core to clients, workers, repositories and the clock."""
