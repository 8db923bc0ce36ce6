"""The model parameters that the server reads: their names, values and defaults.

Validation, the hints of `shmserve check`, the comments that `shmserve init` writes and docs/parameters.md follow from
this table. Parameters that only one backend knows are the backend's own.

Invariant: nothing here parses configuration files, so that a worker with its own interpreter can use it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.repo.config.outline import escaped
from shmserve.repo.config.problems import ProblemFunction
from shmserve.repo.config.schema import ModelConfig

T = TypeVar("T")
D = TypeVar("D")
YES = frozenset({"true", "yes", "1", "on"})
NO = frozenset({"false", "no", "0", "off"})
INSTANCES = 1024
"""Maximum number of instances of one model; each is a process."""
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
"""Path prefix that stands for the model's directory."""
ENTRIES = 64
"""Maximum number of entries of a list of shares or aliases."""
ALIAS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)

GROUPS = {
    "Crashes and hangs": "models.md#a-model-that-crashes-or-hangs",
    "Memory and processes": "many-models.md",
    "Instances that follow the load": "scaling.md",
    "Versions": "lifecycle.md#versions-canaries-and-aliases",
    "Padding": "transformers.md",
    "Python models": "python.md",
    "GPUs": "gpu.md#overlapping-batches",
    "Ensembles": "ensembles.md",
    "OpenAI's API": "openai.md",
}
"""Group of parameters -> the page that explains it."""
_S, _MS, _MIB = 10**9, 10**6, 1 << 20
_HANGS, _MEMORY, _SCALING, _VERSIONS, _PADDING, _PYTHON, _GPUS, _ENSEMBLES, _OPENAI = GROUPS


# ------------------------------------------------------------------------------------------------ kinds of values


class ParameterKind(Struct, Generic[T], frozen=True):
    """`parse` raises ValueError, with a text if only a part of the value is invalid. `expected` describes valid values.
    A value of 1 is `unit` after parsing."""

    parse: Callable[[str], T]
    expected: str
    unit: int = 1


def _number(
    expected: str, example: str = "", zero: str = "", *, unit: int = 1, minimum: int = 0, maximum: int = 999_999
) -> ParameterKind[int]:
    """An integer, or a decimal number if the unit is a time. `zero`: what "0" means, if that is special."""
    pattern = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?" if unit in (_S, _MS) else "[0-9]{1,15}")

    def parse(text: str) -> int:
        if not pattern.fullmatch(text) or not minimum <= float(text) < maximum + 1:
            raise ValueError
        return round(float(text) * unit)

    such = f', such as "{example}"' if example else ""
    special = f', or "0" for {zero}' if zero else ""
    return ParameterKind(parse, f"{expected}{such}{special}", unit)


def _seconds(example: str, zero: str = "") -> ParameterKind[int]:
    return _number("seconds", example, zero, unit=_S)


def _mebibytes(zero: str = "") -> ParameterKind[int]:
    return _number("MiB", "2048", zero, unit=_MIB, maximum=999_999_999)


def _integer(minimum: int, maximum: int) -> ParameterKind[int]:
    return _number(f"an integer from {minimum} to {maximum}", minimum=minimum, maximum=maximum)


def _words(true: frozenset[str], false: frozenset[str]) -> ParameterKind[bool]:
    def parse(text: str) -> bool:
        if text.lower() not in true | false:
            raise ValueError
        return text.lower() in true

    return ParameterKind(parse, '"true" or "false"')


def _text(expected: str) -> ParameterKind[str]:
    """A text that is parsed where it is used."""
    return ParameterKind(str, expected)


def _absolute_path(text: str) -> str:
    if not re.fullmatch(r"(/|\$\$TRITON_MODEL_DIRECTORY/)[^\0]+", text):
        raise ValueError
    return text


_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_PERCENT = re.compile(r"([0-9]{1,3})%?", re.ASCII)


def _pairs(text: str) -> list[tuple[str, str]]:
    entries = []
    for entry in text.split(",") if text.strip() else ():
        name, separator, value = entry.strip().partition("=")
        if not separator:
            raise ValueError(f'found "{escaped(name)}"')
        entries.append((name, value))
    names = [name for name, _ in entries]
    if len(entries) > ENTRIES:
        raise ValueError(f"found {len(entries)} entries")
    if len(set(names)) < len(names):
        raise ValueError(f'found "{escaped(max(names, key=names.count))}" twice')
    return entries


def _shares_in(text: str) -> dict[int, int]:
    shares = {}
    for version, value in _pairs(text):
        percent = _PERCENT.fullmatch(value)
        if not _VERSION.fullmatch(version) or percent is None or int(percent[1]) > 100:
            raise ValueError(f'found "{escaped(f"{version}={value}")}"')
        shares[int(version)] = int(percent[1])
    return shares


def _aliases_in(text: str) -> dict[str, int]:
    aliases = {}
    for name, version in _pairs(text):
        if not ALIAS.fullmatch(name) or not _VERSION.fullmatch(version):
            raise ValueError(f'found "{escaped(f"{name}={version}")}"')
        aliases[name] = int(version)
    return aliases


def _adapters_in(text: str) -> dict[str, str]:
    adapters = dict(_pairs(text))
    for name, path in adapters.items():
        if not ALIAS.fullmatch(name) or path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f'found "{escaped(f"{name}={path}")}"')
    return adapters


def _pooling_in(text: str) -> str:
    if text not in ("mean", "cls", "last"):
        raise ValueError
    return text


def _tags_in(text: str) -> str:
    if not 1 <= len(text.split()) <= 2:
        raise ValueError
    return text


def _object_in(text: str) -> str:
    try:
        is_object = isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError
    return text


_POOLING = ParameterKind(_pooling_in, '"mean", "cls" or "last"')
_FLAG = _words(frozenset({"true"}), frozenset({"false"}))
_SHARES = ParameterKind(_shares_in, 'VERSION=PERCENT, such as "3=10"')
_BATCHED = "models with `dynamic_batching`"
_INSTANCES = _number(f"a number of instances from 1 to {INSTANCES}", "4", minimum=1, maximum=INSTANCES)


# ------------------------------------------------------------------------------------------------------- the table


class ServerParameter(Struct, Generic[T], frozen=True):
    """A row of the table. `unset`: the default in words, if it is not a value. `flag`: the setting of the server that a
    model without the parameter has. `models`: those for which it is read. `backends`: if not empty, only these read it,
    and another backend may have a parameter of this name."""

    name: str
    group: str
    kind: ParameterKind[Any]
    default: T
    help: str
    unset: str = ""
    flag: str = ""
    models: str = "all but ensembles"
    backends: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The field of the configuration, as in problems."""
        return f'parameters["{self.name}"]'

    @property
    def default_text(self) -> str:
        if self.unset or self.flag:
            return self.unset or f"`--{self.flag}`"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default / self.kind.unit:g}" if isinstance(self.default, int) else "none"

    def is_set(self, config: ModelConfig) -> bool:
        return self.name in config.parameters

    def wrong(self, config: ModelConfig) -> str:
        """Why the value is invalid; "" if it is valid, or not given."""
        parameter = config.parameters.get(self.name)
        if parameter is None:
            return ""
        try:
            self.kind.parse(parameter.string_value)
        except ValueError as error:
            return str(error) or f'found "{escaped(parameter.string_value)}"'
        return ""

    def read(self, config: ModelConfig) -> T:
        """The value, in the unit that the core uses: nanoseconds, bytes. Raises InvalidRequest."""
        parameter = config.parameters.get(self.name)
        if parameter is None:
            return self.default
        try:
            value: T = self.kind.parse(parameter.string_value)
        except ValueError:
            text = f"parameter {self.name} of model '{config.name}' must be {self.kind.expected}"
            raise InvalidRequest(f"{text}, not '{escaped(parameter.string_value)}'") from None
        return value


TABLE: dict[str, ServerParameter[Any]] = {}
"""Name -> its row."""


def _row(group: str, name: str, kind: ParameterKind[T], default: D, text: str, **more: Any) -> ServerParameter[T | D]:
    row: ServerParameter[T | D] = ServerParameter(name, group, kind, default, text, **more)
    TABLE[name] = row
    return row


EXECUTION_LIMIT = _row(
    _HANGS,
    "execution_limit_secs",
    _seconds("2.5", "no limit"),
    None,
    "A batch that runs for longer than this counts as hung, and its worker process is replaced.",
    flag="execution-limit-secs",
)
CRASH_LIMIT = _row(
    _HANGS,
    "crash_limit",
    _number("a number of crashes", "5", "no limit"),
    None,
    "After this many crashes without a completed batch in between, an instance is given up.",
    flag="crash-limit",
)
RETRY = _row(
    _HANGS,
    "retry_alone",
    _FLAG,
    True,
    "Requests whose worker died are run again. Set false if a request must not run twice.",
)
MEMORY_LIMIT = _row(
    _MEMORY,
    "memory_limit_mb",
    _mebibytes("no limit"),
    None,
    "An instance whose process uses more private memory is killed.",
    flag="instance-memory-limit",
)
GPU_MEMORY_LIMIT = _row(
    _MEMORY,
    "gpu_memory_limit_mb",
    _mebibytes("no limit"),
    None,
    "An instance whose process uses more memory on its GPU is killed.",
    flag="instance-gpu-memory-limit",
)
MEMORY = _row(
    _MEMORY,
    "memory_mb",
    _mebibytes(),
    None,
    "The memory that an instance needs. A memory budget uses this number until the memory has been measured.",
    unset="estimated from the files",
)
GPU_MEMORY = _row(
    _MEMORY,
    "gpu_memory_mb",
    _mebibytes(),
    None,
    "The memory that an instance needs on its GPU, used in the same way.",
    unset="estimated from the files",
)
IDLE_UNLOAD = _row(
    _MEMORY,
    "idle_unload_secs",
    _seconds("300", "never"),
    None,
    "After this time without requests, the worker processes of a version end. The next request starts them again.",
    flag="idle-unload-secs",
)
STAY_LOADED = _row(
    _MEMORY,
    "stay_loaded",
    _FLAG,
    False,
    "The worker processes run even if the model is idle or other models need memory.",
)
ENVIRONMENT = _row(
    _MEMORY,
    "EXECUTION_ENV_PATH",
    ParameterKind(_absolute_path, f"an absolute path, or one that begins with {MODEL_DIRECTORY}/"),
    "",
    "The Python environment of the model's workers, as a directory or an archive.",
    unset="the server's",
)
MIN_INSTANCES = _row(
    _SCALING,
    "min_instances",
    _INSTANCES,
    None,
    "The fewest instances of each group, on each of its GPUs.",
    unset="1, if `max_instances` is set",
)
MAX_INSTANCES = _row(
    _SCALING,
    "max_instances",
    _INSTANCES,
    None,
    "The most instances of each group, on each of its GPUs.",
    unset="`count`, if `min_instances` is set",
)
SCALE_UP_QUEUE = _row(
    _SCALING,
    "scale_up_queue_ms",
    _number("milliseconds", "50", unit=_MS, maximum=999_999_999),
    50 * _MS,
    "An instance is added if requests wait in the queue for longer than this, on average.",
)
SCALE_DOWN = _row(
    _SCALING,
    "scale_down_secs",
    _seconds("30"),
    30 * _S,
    "An instance is removed if fewer would have been enough for this time.",
)
TRAFFIC = _row(
    _VERSIONS,
    "traffic",
    _SHARES,
    dict[int, int](),
    "The shares of versions, in the requests that name none. The highest READY version without a share gets the rest.",
    models="all",
)
ALIASES = _row(
    _VERSIONS,
    "aliases",
    ParameterKind(_aliases_in, 'NAME=VERSION, such as "prod=2"'),
    dict[str, int](),
    "Names of versions, which clients use as `MODEL@NAME`.",
    models="all",
)
SHADOW = _row(
    _VERSIONS,
    "shadow",
    _SHARES,
    dict[int, int](),
    "The version that also gets copies of this share of the requests. Its responses are compared and discarded.",
    models="all but ensembles, sequences, decoupled models and `preserve_ordering`",
)
PADDING = _row(
    _PADDING,
    "padding",
    _text("NAME, NAME=VALUE, NAME[AXIS] or NAME[AXIS]=VALUE, separated by spaces"),
    "",
    "Inputs that are padded so that requests of different lengths share a batch. AXIS is an index into `dims`, by "
    "default the first -1. VALUE is 0 or the empty string by default.",
    models=_BATCHED,
)
PADDING_OUTPUTS = _row(
    _PADDING,
    "padding_outputs",
    _text("NAME or NAME[AXIS], separated by spaces; empty: none"),
    "",
    "Outputs that are cut back to the length of each request. An output with several dims of -1 must be named.",
    unset="each output with one -1 in its dims",
    models=_BATCHED,
)
PADDING_LOOKAHEAD = _row(
    _PADDING,
    "padding_lookahead",
    _integer(1, 4096),
    64,
    "The number of queued requests among which the batcher looks for similar lengths.",
    models=_BATCHED,
)
PADDING_MULTIPLE = _row(
    _PADDING,
    "padding_multiple",
    _integer(1, 1 << 20),
    1,
    "Lengths are padded to a multiple of this, for engines that optimise for each new shape.",
    models=_BATCHED,
)
PADDING_BATCH_COST = _row(
    _PADDING,
    "padding_batch_cost",
    _integer(0, 1 << 40),
    128,
    "The fixed cost of a batch, in elements (rows x padded length). Raise it if small batches are as slow as large "
    "ones, as on a GPU.",
    models=_BATCHED,
)
STACKED = _row(
    _PYTHON, "stacked", _FLAG, False, "The model gets a batch as one array for each input.", backends=("python",)
)
STRICT_OUTPUTS = _row(
    _PYTHON,
    "strict_outputs",
    _FLAG,
    False,
    "An output whose type or shape differs from the configuration is an error.",
    backends=("python",),
)
SEND_WAITS = _row(
    _PYTHON,
    "send_waits",
    _FLAG,
    True,
    "A sender waits for a slow client when 1 MiB of responses is queued. With false, it never waits.",
    backends=("python",),
)
HOST_INPUTS = _row(
    _PYTHON,
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    ParameterKind(lambda text: text.lower() not in ("no", "false"), '"yes" or "no"'),
    True,
    "Inputs are in host memory. With no, inputs that are on the GPU of the instance stay there.",
    unset="yes",
    backends=("python",),
)
FUNCTION = _row(
    _PYTHON,
    "function",
    _text("the name of a function"),
    "",
    "The function with `@shmserve.model` that is the model. `shmserve serve FILE.py` sets it.",
    backends=("python",),
)
JSON_SCHEMAS = _row(
    _PYTHON,
    "json_schemas",
    _text('{"inputs": {NAME: SCHEMA}, "outputs": {...}, "components": {...}}'),
    "",
    "JSON schemas of tensors of type BYTES, so that `generate` takes and returns objects for them, or files in base64. "
    "Functions with `@shmserve.model` set it.",
)
OVERLAP = _row(
    _GPUS,
    "overlap_batches",
    _words(YES, NO),
    True,
    "The copies of a batch overlap with the computation of others. With false, buffers take half the memory.",
    backends=("tensorrt", "pytorch"),
)
_row(
    _ENSEMBLES,
    "step[INDEX].map",
    _text("the name of an ensemble tensor that the step reads"),
    "",
    "The step runs once for each row of this tensor along axis 0, and the responses are combined.",
    models="ensembles",
)
_row(
    _ENSEMBLES,
    "step[INDEX].if",
    _text("the name of an ensemble tensor, BOOL with one element"),
    "",
    "The step runs only if this tensor is true.",
    models="ensembles",
)
CHAT_TEMPLATE = _row(
    _OPENAI,
    "chat_template",
    _text("a Jinja template"),
    "",
    "The template that turns the messages of a chat into a prompt.",
    unset="that of the GGUF file, or none",
    models="language models",
)
_row(
    _OPENAI,
    "chat_template_kwargs",
    ParameterKind(_object_in, 'a JSON object, such as {"enable_thinking": false}'),
    "",
    "Variables of the chat template, unless a request has others of the same name.",
    models="language models",
)
for _name in ("bos_token", "eos_token", "pad_token", "unk_token"):
    _row(_OPENAI, _name, _text("a text"), "", "A variable of the chat template.", models="language models")
ADAPTERS = _row(
    _OPENAI,
    "adapters",
    ParameterKind(_adapters_in, 'NAME=PATH, such as "french=french.gguf", with paths in the directory of the version'),
    dict[str, str](),
    "Adapters (LoRA) of the model, which clients use as `MODEL:NAME`.",
    models="language models",
)
REASONING_TAGS = _row(
    _OPENAI,
    "reasoning_tags",
    ParameterKind(_tags_in, 'one or two tags, such as "<think> </think>"'),
    "",
    "The text between these tags is the `reasoning_content` of a chat, not its content. If the chat template has "
    "already begun the thinking, give the closing tag only. llama.cpp knows the tags of most templates.",
    models="language models",
)
_row(
    _OPENAI,
    "default_max_tokens",
    _text("a number of tokens"),
    "",
    "The `max_tokens` of requests that do not set it.",
    unset="that of the engine",
    models="language models",
)
QUEUE_TOKENS = _row(
    _OPENAI,
    "max_queue_tokens",
    _number("a number of tokens", "100000", "no limit", maximum=999_999_999),
    0,
    "A request is refused if the prompts that wait for the engine, with its own, have more tokens than this.",
    backends=("llamacpp", "vllm"),
)
_row(
    _OPENAI,
    "embedding_input",
    _text("the name of a STRING input"),
    "",
    "The input that gets the texts of an embedding request.",
    unset="the only such input",
    models="embedding models",
)
_row(
    _OPENAI,
    "embedding_output",
    _text("the name of an output of floats"),
    "",
    "The output with the embeddings.",
    unset="the only output",
    models="embedding models",
)
_row(
    _OPENAI,
    "embedding_pooling",
    _POOLING,
    "",
    "How the vectors of the tokens become the embedding: their mean, the first or the last one.",
    unset="the output has one vector",
    models="embedding models",
)
_row(
    _OPENAI,
    "embedding_normalize",
    _FLAG,
    False,
    "Embeddings are scaled to length 1.",
    unset="true with a pooling",
    models="embedding models",
)


# --------------------------------------------------------------------------------------------------- all parameters

IN_PLACE = frozenset(row.name for row in TABLE.values() if row.group in (_SCALING, _VERSIONS))
"""Parameters that can change without a reload."""
_NEAR = 0.88
"""Minimum similarity of a misspelt name. Backends have parameters of their own, some with similar names."""


def _read_for(config: ModelConfig) -> Iterator[ServerParameter[Any]]:
    return (row for row in TABLE.values() if not row.backends or config.backend in row.backends)


def validate_values(config: ModelConfig, problem: ProblemFunction) -> None:
    """Reports each invalid value. Rules for several parameters are in `rules`."""
    for row in _read_for(config):
        if wrong := row.wrong(config):
            problem(row.path, f"{wrong}, expected {row.kind.expected}")


def misspelt(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Parameters with almost the name of one that the server reads -> a warning. No other unknown name is reported: a
    backend or a model may read it."""
    names = {row.name.lower(): row.name for row in _read_for(config)}
    for key in config.parameters:
        lower = key.lower()
        if key in TABLE or key.startswith("step["):
            continue
        without_unit = [name for name in names if "_" in lower and name.startswith(f"{lower}_")]
        if near := without_unit or difflib.get_close_matches(lower, names, n=1, cutoff=_NEAR):
            yield f'parameters["{key}"]', f'not read by the server; did you mean "{names[near[0]]}"?'
