"""Models written in Python, in three forms: model.py, Python-based backend, function."""
