"""Opens the session of a model: its threads, device and optimizations, and what must run before the first batch."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidRequest, NotFound, Unsupported
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.backends.tensorflow.engine import config_pb2, engine_text, tf, v1
from shmserve.workers.backends.tensorflow.files import FrozenGraph, Program
from shmserve.workers.process.device import device_of, visible_number

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Context

NAME = "tensorflow"
INIT_OPS = "TF_INIT_OPS_FILE"
_IN_THIS_THREAD = -1
"""For the engine, 0 means its own choice and 1 means one additional thread."""


def opened(context: Context, config: ModelConfig, program: Program) -> Any:
    parameters = Parameters(config)
    frozen = isinstance(program, FrozenGraph)
    if parameters.text(INIT_OPS) and not frozen:
        raise parameters.wrong(INIT_OPS, "left out for a SavedModel, which names its own initialization")
    graph = program.imported if isinstance(program, FrozenGraph) else tf.Graph()
    names = init_ops(context, parameters.text(INIT_OPS)) if parameters.text(INIT_OPS) else []
    session = v1.Session(graph=graph, config=options_of(context, config))
    try:
        with graph.as_default():
            if not frozen:
                v1.saved_model.load(session, list(program.tags), os.fspath(program.path))
            elif names:
                session.run(names)
    except (ValueError, KeyError, tf.errors.OpError) as error:
        session.close()
        raise InvalidRequest(f"unable to load model '{config.name}': {engine_text(error)}") from error
    except BaseException:
        session.close()
        raise
    return session


def options_of(context: Context, config: ModelConfig) -> Any:
    parameters = Parameters(config)
    between = parameters.whole("TF_NUM_INTER_THREADS", 1)
    options = config_pb2.ConfigProto(
        intra_op_parallelism_threads=parameters.whole("TF_NUM_INTRA_THREADS", 0) or context.engine_threads,
        # With separate threads for operators, a small batch takes 0.1 ms longer and three times the processor time.
        inter_op_parallelism_threads=between if between > 1 else _IN_THIS_THREAD,
        use_per_session_threads=parameters.flag("TF_USE_PER_SESSION_THREADS", False),
        allow_soft_placement=context.allows(NAME, "allow-soft-placement", True),
    )
    parameters.whole("MAX_SESSION_SHARE_COUNT", 1)  # only validated: instances are processes with one session each
    _set_level(options, config)
    _set_device(options, context, config)
    return options


def _set_level(options: Any, config: ModelConfig) -> None:
    graph = config.optimization.graph if config.optimization is not None else None
    level = graph.level if graph is not None else 0
    optimizer = options.graph_options.optimizer_options
    if level < 0:
        optimizer.opt_level = optimizer.L0
    elif level:
        optimizer.global_jit_level = optimizer.ON_1 if level == 1 else optimizer.ON_2


def _set_device(options: Any, context: Context, config: ModelConfig) -> None:
    kind, number = device_of(config, context.instance)
    if kind == "CPU":
        options.device_count["GPU"] = 0
    if kind != "GPU":
        return
    if not tf.config.list_physical_devices("GPU"):
        raise Unsupported(
            f"instance '{context.instance}' is to run on GPU {number}, and the TensorFlow that is installed finds "
            "none: it needs the package tensorflow[and-cuda] and a driver; or choose KIND_CPU"
        )
    text = context.setting(NAME, "gpu-memory-fraction", "0")
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise InvalidRequest(f"gpu-memory-fraction must be a number from 0 to 1, found '{text}'")
    options.gpu_options.visible_device_list = str(visible_number(number))
    options.gpu_options.per_process_gpu_memory_fraction = fraction
    options.gpu_options.allow_growth = not fraction


def init_ops(context: Context, name: str) -> list[str]:
    """Returns the operators that a file in the version's or the model's directory names."""
    path = next((path for path in (context.version_folder / name, context.folder / name) if path.is_file()), None)
    if path is None:
        raise NotFound(f"model '{context.model}' has no file '{name}', which parameter {INIT_OPS} names")
    try:
        names = json.loads(path.read_text())["init_ops"]
        if not (isinstance(names, list) and all(isinstance(each, str) for each in names)):
            raise ValueError("init_ops is not a list of names")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f'{name} must contain {{"init_ops": ["NAME", ...]}}: {error}') from error
    return names
