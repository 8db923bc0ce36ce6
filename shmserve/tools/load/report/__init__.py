"""The reports of a saved run: `table` for the terminal, `csv`, `html`, and the `live` line."""
