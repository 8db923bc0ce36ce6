"""Backends: each runs the models of one engine.

`base` is the interface and `registry` finds a backend by its name. A worker creates one backend, which reads the model
file and loads the model, and calls the model once for each batch: a StackedModel with one array per input, a
SeparateModel with the requests.
Each large engine has a package, and code that engines share (model facts, parameters, GPU buffers) is beside them.
Backends outside this project import the names below.
"""

from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelOutput
from shmserve.workers.backends.base import Backend, Context, SeparateModel, StackedModel
from shmserve.workers.batch.gather import GatherGroup
from shmserve.workers.batch.results import Results
from shmserve.workers.model_calls.answer import Request, Response

__all__ = [
    "Backend",
    "Context",
    "GatherGroup",
    "ModelConfig",
    "ModelInput",
    "ModelOutput",
    "Request",
    "Response",
    "Results",
    "SeparateModel",
    "StackedModel",
]
