"""The reports of a saved run: `table` for the terminal, `csv`, `html` with `charts`, and the `live` line."""
