"""The owners of state: what `State` is made of. Each changes only its own tables."""
