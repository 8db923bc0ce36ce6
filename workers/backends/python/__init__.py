"""Models written in Python, and the module `triton_python_backend_utils` that they import.

`model_file` imports a model.py, `model` creates the instance of its class, and `backend` runs it with a list of
requests for each batch, or `stacked` with one array for each input. `pb_utils` is the module that models import; the
other pb_* modules implement its tensors, requests, calls, metrics and configuration. `forked_calls` makes the calls of
processes that a model forks.

`function_model` makes such a class of a function with `@shmserve.model`, whose type hints `signature` reads; `records`
and `codecs` handle hints that are more than a number.
"""
