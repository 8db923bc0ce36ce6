"""Models written in Python, and the module `triton_python_backend_utils` that they import."""
