"""The reports of a saved run: `table` for the terminal, `csv` and `html`."""
