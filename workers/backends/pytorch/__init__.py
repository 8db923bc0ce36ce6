"""Models run by PyTorch.

`programs` opens a file as a program and maps the tensors of the configuration to its arguments and results. `backend`
runs batches with it, and `device` creates tensors over GPU memory that PyTorch does not own.
"""
