"""One model in the foreground: what `shmserve run` becomes, `python -m shmserve.workers.solo ORDER`.

The rule: the model meets what it meets in a worker of a server, the same loading, the same batches, the same read-only
inputs; only the terminal is its own, and what goes wrong is shown in full.

Exit codes: 0 done, 1 the model failed, 2 used wrongly.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from shmserve import feed, show
from shmserve.allocator import keep_freed_memory
from shmserve.dtypes import to_numpy
from shmserve.errors import InvalidRequest, NotFound, ServeError, from_wire
from shmserve.messages import Load, Options, Row, Tensor, Wanted, Work
from shmserve.repo.backends import DIRECTORY, installed, not_usable
from shmserve.repo.gpus import VISIBLE, discover
from shmserve.repo.load import verify
from shmserve.repo.origins import surprises
from shmserve.repo.schema import encode_config
from shmserve.repo.store import Found, scan_model
from shmserve.shm.mapped import Mapped
from shmserve.shm.strings import decode_bytes, encode_bytes
from shmserve.tables import duration_text, shape_text, table
from shmserve.workers.model import Model, load
from shmserve.workers.outbox import Unheard
from shmserve.workers.say import say
from shmserve.workers.specs import Spec, controls_of, inputs_of, outputs_of
from shmserve.workers.terminal import Terminal

if TYPE_CHECKING:
    from shmserve.repo.schema import ModelConfig

Array = np.ndarray[Any, np.dtype[Any]]
OWNER = 1
"""Whose memory the outputs are in: of the only process there is."""
AUDIENCE = "internal"


class Order(Struct, forbid_unknown_fields=True):
    """What `shmserve run` was asked for, by the names of its arguments."""

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


class Failed(Exception):
    """The model cannot be loaded, or has failed, and the trace was shown if there is one: lines for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    faulthandler.enable()
    keep_freed_memory()
    return run(msgspec.json.decode(words[0], type=Order))


def run(order: Order) -> int:
    """Everything from the order to the exit code."""
    terminal = Terminal(order.json, order.pdb)
    try:
        return _run(order, terminal)
    except feed.Refused as error:
        return terminal.end(str(error), 2)
    except (Failed, ServeError, show.NotWritten) as error:
        return terminal.end(str(error), 1)
    except SystemExit as error:
        return terminal.end(f"the model called sys.exit({error.code!r}); in a server that ends its worker", 1)
    except BrokenPipeError:  # who reads our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return terminal.end("interrupted", 130)


def _run(order: Order, terminal: Terminal) -> int:
    source = feed.Source(order.input, order.file, order.random, order.batch, order.shape, order.seed)
    source.check()
    found, version = _find(order)
    started = time.perf_counter()
    mapped = Mapped()
    with _loaded(order, found, version, mapped, terminal) as model:
        loading = time.perf_counter() - started
        config = model.config
        surprising = surprises(found.given, config) if found.given is not None else []
        for text in surprising:
            say(text, "warning")
        terminal.print(_heading(config, version, loading))
        work = _work(order, source, config)
        if order.file == "-":
            terminal.read_again()
        answers, seconds = _repeat(order.repeat, work, model, mapped, terminal)
    more = {"load_seconds": round(loading, 6), "warnings": [*found.warnings, *surprising]}
    _show(order, config, version, answers, seconds, more, terminal)
    return 0


def _show(
    order: Order,
    config: ModelConfig,
    version: int,
    answers: list[dict[str, Array]],
    seconds: list[float],
    more: dict[str, Any],
    terminal: Terminal,
) -> None:
    dtypes = {spec.name: spec.dtype for spec in outputs_of(config)}
    parted = _decoupled(config)
    parts = []
    for number, outputs in enumerate(answers, 1):
        folder = None if order.out is None else Path(order.out) / (str(number) if parted else "")
        files = show.write(folder, outputs, dtypes) if folder is not None else {}
        parts.append(show.document(config.name, version, outputs, dtypes, files, seconds))
        if not order.json:
            title = f"part {number}\n" if parted else ""
            terminal.print(f"{title}{show.outputs_table(outputs, dtypes, files)}\n")
    if not order.json:
        count = f"{len(parts)} part{'s' if len(parts) != 1 else ''}, " if parted else ""
        terminal.print(f"{config.name} version {version}, {count}{show.timing(seconds)}")
    elif parted:
        document = show.document(config.name, version, {}, dtypes, {}, seconds)
        terminal.document(document | {"parts": [part["outputs"] for part in parts]} | more)
    else:
        terminal.document(parts[0] | more)


def _decoupled(config: ModelConfig) -> bool:
    return config.model_transaction_policy is not None and config.model_transaction_policy.decoupled


# ------------------------------------------------------------------------------------------ the model


def _find(order: Order) -> tuple[Found, int]:
    """The model of the directory, and the version to run: the one that was asked for, or the highest one served."""
    # Not resolved: the name of the model is that of the link.
    path = Path(os.path.abspath(order.model_dir))
    if not path.is_dir():
        raise feed.Refused(f"{order.model_dir} is not a directory; name that of a model, with its config.pbtxt")
    fault = not_usable(Path(order.backend_directory)) if order.backend_directory else ""
    if fault:
        raise feed.Refused(f"--backend-directory {fault}")
    try:
        backends, gpus = installed(order.backend_directory), discover().numbers
        found = scan_model(path, backends=backends, gpus=gpus, config_name=order.model_config_name)
    except InvalidRequest as error:
        raise feed.Refused(str(error)) from error
    for warning in found.warnings:
        say(warning, "warning")
    if found.problems or found.config is None:
        raise Failed("\n".join([f"model '{found.name}' cannot be loaded:", *found.problems]))
    if order.version is None:
        return found, found.versions[-1]
    if not (path / str(order.version)).is_dir():
        there = ", ".join(map(str, found.versions))
        raise NotFound(f"model '{found.name}' has no version {order.version}; its versions are: {there}")
    if order.version in found.missing:
        raise Failed(f"failed to load model '{found.name}' version {order.version}: {found.missing[order.version]}")
    if order.version not in found.versions:
        say(f"version {order.version} of model '{found.name}' would not be served: its version policy", "warning")
    return found, order.version


def _show_one_gpu(config: ModelConfig) -> None:
    """As in a server, an instance on a GPU sees that one only."""
    group = config.instance_group[0] if config.instance_group else None
    uuid = discover().uuids().get(group.gpus[0]) if group is not None and group.gpus else None
    if uuid is not None:
        os.environ[VISIBLE] = uuid


@contextmanager
def _loaded(order: Order, found: Found, version: int, mapped: Mapped, terminal: Terminal) -> Iterator[Model]:
    """The model, finalized at the end, and everything that it has told nobody of."""
    config = found.config
    assert config is not None
    instance = f"{config.instance_group[0].name}_0" if config.instance_group else f"{config.name}_0_0"
    _show_one_gpu(config)
    told = Load(OWNER, config.name, version, instance, str(found.path), _settings(order))
    try:
        model = load(told, encode_config(config), Unheard(), mapped, terminal.trace)
    except Exception as error:
        text = terminal.failure(error)
        raise Failed(f"failed to load model '{config.name}' version {version}: {text}") from None
    try:
        verify(model.config, backends=installed(order.backend_directory))
        yield model
    finally:
        try:
            model.backend.close()
        except Exception as error:
            text = terminal.failure(error)
            raise Failed(f"model '{config.name}' failed while it was finalized: {text}") from None
        finally:
            model.arenas.close()
            mapped.close()


def _settings(order: Order) -> dict[str, str]:
    """BACKEND,KEY=VALUE, or KEY=VALUE for all backends; and what a server tells its workers."""
    found = {DIRECTORY: os.path.abspath(order.backend_directory)} if order.backend_directory else {}
    for text in order.backend_config:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise feed.Refused(f"--backend-config {text}: write BACKEND,KEY=VALUE")
        found[key if "," in key else f",{key}"] = value
    return found


def _heading(config: ModelConfig, version: int, loading: float) -> str:
    rows = []
    for kind, specs in (("input", inputs_of(config)), ("output", outputs_of(config))):
        rows += [[kind, spec.name, spec.dtype, shape_text(_pattern(spec))] for spec in specs]
    first = f"{config.name} version {version} ({config.backend}), loaded in {duration_text(loading)}"
    return f"{first}\n\n{table(['', 'name', 'dtype', 'shape'], rows)}\n"


# ------------------------------------------------------------------------------------------ one request


def _pattern(spec: Spec) -> list[int]:
    """The shape that callers see, -1 where it varies."""
    return [-1, *spec.dims] if spec.batched else list(spec.dims)


def _work(order: Order, source: feed.Source, config: ModelConfig) -> Work:
    """The request, in which everything is as the model's configuration wants it."""
    specs = inputs_of(config)
    known = {spec.name: {"name": spec.name, "datatype": spec.dtype, "shape": _pattern(spec)} for spec in specs}
    most = config.max_batch_size
    given = feed.inputs(source, config.name, known, lambda: most)
    missing = {spec.name: known[spec.name] for spec in specs if not spec.optional and spec.name not in given}
    if missing:
        raise feed.Refused(f"model '{config.name}' also needs {feed.describe(missing)}")
    sizes = {name: array.shape[0] for name, array in given.items()} if most else {}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"'{name}' {size}" for name, size in sizes.items())
        raise feed.Refused(f"the inputs of model '{config.name}' must have the same number of rows: {listed}")
    rows = next(iter(sizes.values()), 1) if most else 0
    if rows > most:
        raise feed.Refused(f"{rows} rows: the max_batch_size of model '{config.name}' is {most}")
    # More bytes than would travel inside a message, but these do not travel.
    tensors = tuple(
        Tensor(spec.name, spec.dtype, given[spec.name].shape, _bytes(given[spec.name], spec))
        for spec in specs
        if spec.name in given
    )
    return Work(1, rows, tensors, _wanted(order, config), AUDIENCE, _sequence(config))


def _sequence(config: ModelConfig) -> Options | None:
    """A model of sequences gets one of a single request."""
    if config.sequence_batching is None:
        return None
    named = any(not spec.item for spec in controls_of(config))  # only ids may be strings
    return Options(sequence="1" if named else 1, sequence_start=True, sequence_end=True)


def _bytes(array: Array, spec: Spec) -> bytes:
    return array.tobytes() if spec.item else bytes(encode_bytes(array))


def _wanted(order: Order, config: ModelConfig) -> tuple[Wanted, ...] | None:
    if not order.outputs:
        return None
    names = [entry.name for entry in config.output]
    wanted = order.outputs.split(",")
    for name in wanted:
        if name not in names:
            raise feed.Refused(f"the model has no output '{name}'; it has {', '.join(names)}")
    return tuple(Wanted(name) for name in wanted)


def _repeat(
    times: int, work: Work, model: Model, mapped: Mapped, terminal: Terminal
) -> tuple[list[dict[str, Array]], list[float]]:
    """The answers of the last run, nearly always one, and how long each run took."""
    sent: list[Row] = []
    streams = model.backend.streams
    if streams is not None:
        streams.connect(-1, lambda: None, sent.append, model.runner.row, lambda row: None)
    seconds = []
    outputs: list[dict[str, Array]] = []
    for turn in range(1, times + 1):
        started = time.perf_counter()
        rows, _, again = model.runner.run((work,))
        while again:
            rows, _, again = model.runner.run((work,))
        while streams is not None and streams.open:
            streams.wait()
        seconds.append(time.perf_counter() - started)
        rows += sent
        sent.clear()
        error = next((row.error for row in rows if row.error is not None), None)
        if error is not None:
            where = f"run {turn} of {times}: " if times > 1 else ""
            raise from_wire(error.code, terminal.quit or f"{where}{error.text}")
        parts = [row for row in rows if row.outputs or not (streams is not None and streams.decoupled)]
        if turn == times:
            outputs = [{tensor.name: _array(tensor, mapped) for tensor in row.outputs} for row in parts]
        for row in parts:
            held = [part for tensor in row.outputs if isinstance(tensor.data, tuple) for part in tensor.data]
            model.arenas.free(held)
    return outputs, seconds


def _array(tensor: Tensor, mapped: Mapped) -> Array:
    """A copy of an output, as its memory is used again."""
    data = tensor.data
    if isinstance(data, tuple):
        data = b"".join(mapped.memory(part).tobytes() for part in data)
    if not isinstance(data, bytes):
        raise InvalidRequest(f"output '{tensor.name}' is nowhere")
    if tensor.dtype == "BYTES":
        return decode_bytes(data, tensor.shape)
    return np.frombuffer(data, to_numpy(tensor.dtype)).reshape(tensor.shape)


if __name__ == "__main__":
    code = main()
    # Not by way of the interpreter's end: threads that a model left running must not keep the terminal.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)
