"""Files that a configuration names: labels, warm-up data, initial states.

`safe_paths` opens them inside the model's directory, `companions` checks that they exist, and `labels` parses label
files. `python_file` imports Python files of users.
"""
