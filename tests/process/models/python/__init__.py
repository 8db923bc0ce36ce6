"""Models written in Python, in all three forms: model.py, Python-based backend, function."""
