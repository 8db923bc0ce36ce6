"""Backends: each runs models of one kind.

`base` is the interface, `registry` finds a backend by its name. A package for each engine holds its backend; what
several engines share (files of a model, parameters, GPU buffers) is beside them. Backends outside of this project
import the names below.
"""

from shmserve.workers.backends.base import Backend, Context, SeparateBackend, StackedBackend
from shmserve.workers.model_calls.answer import Answer, Request

__all__ = ["Answer", "Backend", "Context", "Request", "SeparateBackend", "StackedBackend"]
