"""Backends: each runs the models of one engine.

`base` is the interface and `registry` finds a backend by its name. A worker loads one backend, which reads the model
file, and calls it once for each batch: a StackedBackend with one array per input, a SeparateBackend with the requests.
Each large engine has a package, and code that engines share (model facts, parameters, GPU buffers) is beside them.
Backends outside this project import the names below.
"""

from shmserve.workers.backends.base import Backend, Context, SeparateBackend, StackedBackend
from shmserve.workers.model_calls.answer import Request, Response

__all__ = ["Backend", "Context", "Request", "Response", "SeparateBackend", "StackedBackend"]
