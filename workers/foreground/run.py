"""One model in the foreground, the process of `shmserve run`: `python -m shmserve.workers.foreground ORDER`.

Invariants: the model is found and read as in a server, and runs as in a worker, with the same loading, batches and
read-only inputs. The only differences are the terminal and full error output. Order and model can be serialised,
because the model may run in another interpreter.

Exit codes: 0 done, 1 the model failed, 2 invalid usage, 130 interrupted.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from shmserve.dtypes import from_numpy, to_numpy
from shmserve.errors import InvalidRequest, NotFound, ServeError, from_wire
from shmserve.paths import cache_dir, server_runtime_dir
from shmserve.protocol.messages import Options, Tensor, Wanted
from shmserve.protocol.worker_messages import Load, Prefilled, Row, Unread, Work
from shmserve.repo.backends import DIRECTORY, backend_directory_problem, folder_of, installed
from shmserve.repo.config.schema import decode_config, encode_config
from shmserve.repo.gpus import VISIBLE, discover
from shmserve.repo.rules.fields import completion_warnings, verify_completed
from shmserve.shm.mapped import Mapped
from shmserve.shm.strings import decode_bytes, encode_bytes
from shmserve.system.process import MODEL_HEAP_BYTES, keep_freed_memory
from shmserve.terminal import inputs, output
from shmserve.terminal.errors import Failed, Misuse
from shmserve.terminal.tables import duration_text, shape_text, table
from shmserve.workers.batch.specs import Spec, controls_of, inputs_of, outputs_of
from shmserve.workers.foreground.terminal import Terminal
from shmserve.workers.loading import LoadedModel, load
from shmserve.workers.process.exit_codes import exit_process
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.repo.storage.store import ScannedModel

Array = np.ndarray[Any, np.dtype[Any]]
OWNER = 1
"""The owner of the output segments: any number, as there is only this process."""
AUDIENCE = "internal"


class RunOrder(Struct, forbid_unknown_fields=True):
    """The arguments of `shmserve run`, by name."""

    model_dir: str
    file: str | None = None
    input: list[str] = []
    random: bool = False
    batch: int | None = None
    shape: list[str] = []
    seed: int | None = None
    outputs: str | None = None
    out: str | None = None
    repeat: int = 1
    version: int | None = None
    json: bool = False
    pdb: bool = False
    backend_config: list[str] = []
    model_config_name: str = ""
    backend_directory: str = ""


class RunFailed(Exception):
    """The model cannot be loaded or has failed; the text is for the user, and a traceback was already printed."""


class Chosen(Struct):
    """A model and the version to run. `config`: the complete configuration, as in Load; `provided`: the content of its
    file alone. `environment`: the model's own interpreter; "": this one. `backends`: the available ones."""

    path: str
    version: int
    config: bytes
    provided: bytes | None
    warnings: tuple[str, ...]
    backends: tuple[str, ...]
    environment: str


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return run(msgspec.json.decode(words[0], type=RunOrder))


def resume(arguments: list[str]) -> NoReturn:
    """Continues in the model's interpreter; the argument is the descriptor of the order and the model."""
    with open(int(arguments[0]), "rb") as file:
        order, chosen = msgspec.msgpack.decode(file.read(), type=tuple[RunOrder, Chosen])
    exit_process(run(order, chosen))


def run(order: RunOrder, chosen: Chosen | None = None) -> int:
    """Runs an order and returns the exit code. `chosen`: the model, if this is already its own interpreter."""
    faulthandler.enable()
    keep_freed_memory(MODEL_HEAP_BYTES)
    terminal = Terminal(order.json, order.pdb)
    try:
        return _run(order, chosen, terminal)
    except Misuse as error:
        return terminal.print_failure(str(error), 2)
    except (RunFailed, ServeError, Failed) as error:
        return terminal.print_failure(str(error), 1)
    except SystemExit as error:
        return terminal.print_failure(f"the model called sys.exit({error.code!r}); in a server that ends its worker", 1)
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return terminal.print_failure("interrupted", 130)


def _run(order: RunOrder, chosen: Chosen | None, terminal: Terminal) -> int:
    source = inputs.InputSource(order.input, order.file, order.random, order.batch, order.shape, order.seed)
    source.check()
    if order.random:  # import it early: a Ctrl-C during this import is lost
        importlib.import_module("numpy.random")
    if chosen is None:
        chosen = _choose(order, terminal)
    started = time.perf_counter()
    with _loaded(order, chosen, terminal) as model:
        loading = time.perf_counter() - started
        config = model.config
        completion = completion_warnings(decode_config(chosen.provided), config) if chosen.provided is not None else []
        for text in completion:
            log_message(text, "warning")
        terminal.print(_heading(config, chosen.version, loading))
        work = _work(order, source, config)
        if order.file == "-":
            terminal.reopen_stdin()
        answers, seconds = _repeat(order.repeat, work, model, terminal)
    more = {"load_seconds": round(loading, 6), "warnings": [*chosen.warnings, *completion]}
    _show(order, config, chosen.version, answers, seconds, more, terminal)
    return 0


def _choose(order: RunOrder, terminal: Terminal) -> Chosen:
    """Returns the model if it runs in this interpreter. Otherwise replaces this process by the model's interpreter."""
    chosen = _find(order)
    if not chosen.environment:
        return chosen
    from shmserve.workers.process.environment import replace_interpreter

    descriptor = os.memfd_create("shmserve-run", 0)
    try:
        os.pwrite(descriptor, msgspec.msgpack.encode((order, chosen)), 0)
        cache = cache_dir(server_runtime_dir()) / "environments"
        terminal.restore_stdout()
        replace_interpreter(chosen.environment, str(cache), "shmserve.workers.foreground.run:resume", [str(descriptor)])
    finally:
        os.close(descriptor)


def _find(order: RunOrder) -> Chosen:
    from shmserve.repo.compile import environment  # the model's interpreter may lack the packages that it needs

    model, version = _find_model(order)
    config = model.config
    assert config is not None
    return Chosen(
        str(model.path),
        version,
        encode_config(config),
        None if model.written is None else encode_config(model.written),
        model.warning_texts,
        tuple(installed(order.backend_directory)),
        environment(config, str(model.path), folder_of(config.backend, order.backend_directory)),
    )


def _find_model(order: RunOrder) -> tuple[ScannedModel, int]:
    """Returns the model in the directory and the version to run: the requested one, or the highest one served."""
    from shmserve.repo.storage.store import scan_model  # it may lack those of this one, too

    # Symlinks are not resolved: the model has the name of the link.
    path = Path(os.path.abspath(order.model_dir))
    if not path.is_dir():
        raise Misuse(f"{order.model_dir} is not a directory; name that of a model, with its config.pbtxt")
    fault = backend_directory_problem(Path(order.backend_directory)) if order.backend_directory else ""
    if fault:
        raise Misuse(f"--backend-directory {fault}")
    try:
        backends, gpus = installed(order.backend_directory), discover().numbers
        model = scan_model(path, backends=backends, gpus=gpus, config_name=order.model_config_name)
    except InvalidRequest as error:
        raise Misuse(str(error)) from error
    for warning in model.warning_texts:
        log_message(warning, "warning")
    if model.problems or model.config is None:
        raise RunFailed("\n".join([f"model '{model.name}' cannot be loaded:", *model.problem_texts]))
    if order.version is None:
        return model, model.versions[-1]
    if not (path / str(order.version)).is_dir():
        versions = ", ".join(map(str, model.versions))
        raise NotFound(f"model '{model.name}' has no version {order.version}; its versions are: {versions}")
    if order.version in model.missing:
        raise RunFailed(f"failed to load model '{model.name}' version {order.version}: {model.missing[order.version]}")
    if order.version not in model.versions:
        log_message(
            f"version {order.version} of model '{model.name}' would not be served because of its version_policy",
            "warning",
        )
    return model, order.version


def _show(
    order: RunOrder,
    config: ModelConfig,
    version: int,
    answers: list[dict[str, Array]],
    seconds: list[float],
    more: dict[str, Any],
    terminal: Terminal,
) -> None:
    dtypes = {spec.name: spec.dtype for spec in outputs_of(config)}
    parted = config.decoupled
    parts = []
    for number, outputs in enumerate(answers, 1):
        for name, array in outputs.items():
            if array.dtype != to_numpy(dtypes[name]):  # output differs from the configuration
                dtypes[name] = from_numpy(array.dtype)
        folder = None if order.out is None else Path(order.out) / (str(number) if parted else "")
        files = output.write(folder, outputs, dtypes) if folder is not None else {}
        parts.append(output.document(config.name, version, outputs, dtypes, files, seconds))
        if not order.json:
            title = f"part {number}\n" if parted else ""
            terminal.print(f"{title}{output.outputs_table(outputs, dtypes, files)}\n")
    if not order.json:
        count = f"{len(parts)} part{'s' if len(parts) != 1 else ''}, " if parted else ""
        terminal.print(f"{config.name} version {version}, {count}{output.timing(seconds)}")
    elif parted:
        document = output.document(config.name, version, {}, dtypes, {}, seconds)
        terminal.document(document | {"parts": [part["outputs"] for part in parts]} | more)
    else:
        terminal.document(parts[0] | more)


# ------------------------------------------------------------------------------------------ the model


def _show_one_gpu(config: ModelConfig) -> None:
    """Makes only the instance's GPU visible, as in a server."""
    group = config.instance_group[0] if config.instance_group else None
    uuid = discover().uuids().get(group.gpus[0]) if group is not None and group.gpus else None
    if uuid is not None:
        os.environ[VISIBLE] = uuid


@contextmanager
def _loaded(order: RunOrder, chosen: Chosen, terminal: Terminal) -> Iterator[LoadedModel]:
    """Loads the model; finalizes it and frees its memory at the end."""
    config, version = decode_config(chosen.config), chosen.version
    instance = f"{config.instance_group[0].name}_0" if config.instance_group else f"{config.name}_0_0"
    _show_one_gpu(config)
    load_order = Load(OWNER, config.name, version, instance, chosen.path, _settings(order))
    try:
        model = load(load_order, chosen.config, None, terminal.trace)
    except Exception as error:
        text = terminal.failure(error)
        raise RunFailed(f"failed to load model '{config.name}' version {version}: {text}") from None
    try:
        verify_completed(model.config, backends={*chosen.backends, config.backend})
        yield model
    finally:
        try:
            model.close()
        except Exception as error:
            text = terminal.failure(error)
            raise RunFailed(f"model '{config.name}' failed while it was finalized: {text}") from None
        finally:
            model.arenas.close()
            model.mapped.close()


def _settings(order: RunOrder) -> dict[str, str]:
    """Parses BACKEND,KEY=VALUE, or KEY=VALUE for all backends, and adds the backend directory."""
    settings = {DIRECTORY: os.path.abspath(order.backend_directory)} if order.backend_directory else {}
    for text in order.backend_config:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise Misuse(f"--backend-config {text}: write BACKEND,KEY=VALUE")
        settings[key if "," in key else f",{key}"] = value
    return settings


def _heading(config: ModelConfig, version: int, loading: float) -> str:
    rows = []
    for kind, specs in (("input", inputs_of(config)), ("output", outputs_of(config))):
        rows += [[kind, spec.name, spec.dtype, shape_text(_pattern(spec))] for spec in specs]
    first = f"{config.name} version {version} ({config.backend}), loaded in {duration_text(loading)}"
    return f"{first}\n\n{table(['', 'name', 'dtype', 'shape'], rows)}\n"


# ------------------------------------------------------------------------------------------ one request


def _pattern(spec: Spec) -> list[int]:
    """Returns the shape that callers see, with -1 for variable dims."""
    return [-1, *spec.dims] if spec.batched else list(spec.dims)


def _work(order: RunOrder, source: inputs.InputSource, config: ModelConfig) -> Work:
    specs = inputs_of(config)
    known = {spec.name: {"name": spec.name, "datatype": spec.dtype, "shape": _pattern(spec)} for spec in specs}
    max_batch = config.max_batch_size
    arrays = inputs.inputs(source, config.name, known, lambda: max_batch)
    missing = {spec.name: known[spec.name] for spec in specs if not spec.optional and spec.name not in arrays}
    if missing:
        raise Misuse(f"model '{config.name}' also needs {inputs.describe(missing)}")
    sizes = {name: array.shape[0] for name, array in arrays.items()} if max_batch else {}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"'{name}' {size}" for name, size in sizes.items())
        raise Misuse(f"the inputs of model '{config.name}' must have the same number of rows: {listed}")
    rows = next(iter(sizes.values()), 1) if max_batch else 0
    if rows > max_batch:
        raise Misuse(f"{rows} rows: the max_batch_size of model '{config.name}' is {max_batch}")
    # The data may exceed the limit for inline tensors, because this request is never encoded.
    tensors = tuple(
        Tensor(spec.name, spec.dtype, arrays[spec.name].shape, _bytes(arrays[spec.name], spec))
        for spec in specs
        if spec.name in arrays
    )
    return Work(1, rows, tensors, _wanted(order, config), AUDIENCE, _sequence(config))


def _sequence(config: ModelConfig) -> Options | None:
    """A sequence model gets a sequence of one request."""
    if config.sequence_batching is None:
        return None
    named = any(not spec.item for spec in controls_of(config))  # only the correlation ID may be a string
    return Options(sequence="1" if named else 1, sequence_start=True, sequence_end=True)


def _bytes(array: Array, spec: Spec) -> bytes:
    return array.tobytes() if spec.item else bytes(encode_bytes(array))


def _wanted(order: RunOrder, config: ModelConfig) -> tuple[Wanted, ...] | None:
    if not order.outputs:
        return None
    names = [entry.name for entry in config.output]
    wanted = order.outputs.split(",")
    for name in wanted:
        if name not in names:
            raise Misuse(f"the model has no output '{name}'; it has {', '.join(names)}")
    return tuple(Wanted(name) for name in wanted)


def _repeat(
    times: int, work: Work, model: LoadedModel, terminal: Terminal
) -> tuple[list[dict[str, Array]], list[float]]:
    """Returns the responses of the last run, nearly always one, and the duration of each run."""
    sent: list[Row] = []
    streams = model.model.streams
    reports: list[Unread | Prefilled] = []  # no process reads them
    if streams is not None:
        streams.connect(sent.append, reports.append, model.runner.row, model.runner.discard, lambda: None)
    seconds = []
    outputs: list[dict[str, Array]] = []
    for repetition in range(1, times + 1):
        started = time.perf_counter()
        rows, _, again = model.runner.run((work,))
        while again:
            rows, _, again = model.runner.run((_continued(work),))
        while streams is not None and streams.open:
            streams.wait()
        seconds.append(time.perf_counter() - started)
        rows += sent
        sent.clear()
        error = next((row.error for row in rows if row.error is not None), None)
        if error is not None:
            where = f"run {repetition} of {times}: " if times > 1 else ""
            raise from_wire(error.code, terminal.quit or f"{where}{error.text}")
        parts = [row for row in rows if row.outputs or not (streams is not None and streams.decoupled)]
        if repetition == times:
            outputs = [{tensor.name: _array(tensor, model.mapped) for tensor in row.outputs} for row in parts]
        for row in parts:
            model.runner.discard(row)
    return outputs, seconds


def _continued(work: Work) -> Work:
    """The request of an iterative model that runs again: as in a server, START is true only the first time."""
    assert work.options is not None  # it has a sequence
    return replace(work, options=replace(work.options, sequence_start=False))


def _array(tensor: Tensor, mapped: Mapped) -> Array:
    """Returns a copy of an output, because its memory is reused."""
    data = tensor.data
    if isinstance(data, tuple):
        data = b"".join(mapped.memory(part).tobytes() for part in data)
    if not isinstance(data, bytes):
        raise InvalidRequest(f"output '{tensor.name}' has no data")
    if tensor.dtype == "BYTES":
        return decode_bytes(data, tensor.shape)
    return np.frombuffer(data, to_numpy(tensor.dtype)).reshape(tensor.shape)


if __name__ == "__main__":
    exit_process(main())
