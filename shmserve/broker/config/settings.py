"""The server's settings. Precedence: command line, SHMSERVE_* variables, configuration file, defaults.

Invariant: all errors are reported together, with suggestions, before anything starts; the exit code is 2.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from shmserve.broker.config.command_line import parser
from shmserve.broker.config.values import from_environment, from_toml
from shmserve.broker.listeners.access import AccessRules
from shmserve.broker.models.remote import RemoteSettings
from shmserve.broker.observability.metrics import MetricSettings
from shmserve.broker.observability.traces import otel_settings
from shmserve.broker.processes import cpus
from shmserve.broker.processes.gateways import GatewaySettings, arguments_of
from shmserve.broker.processes.gpus.monitor import INTERVAL_S
from shmserve.broker.processes.workers import WorkerResources
from shmserve.core.limits import Limits
from shmserve.errors import InvalidRequest
from shmserve.paths import LANE, cache_dir, server_runtime_dir
from shmserve.protocol.namespaces import namespace
from shmserve.repo.agents.chains import AgentSettings
from shmserve.repo.agents.registry import directory_problem
from shmserve.repo.backends import (
    CUDA_POOL_LIMIT,
    DIRECTORY,
    LANE_ADDRESS,
    NO_COMPLETION,
    OUTPUT_LIMIT,
    PINNED_LIMIT,
    VERBOSE,
    backend_directory_problem,
)
from shmserve.repo.compile import CoreSet
from shmserve.repo.remote.address import RemoteAddress, is_remote, parse_address
from shmserve.repo.remote.stores import missing_package
from shmserve.repo.storage.layout import repository_of
from shmserve.repo.storage.model_files import ModelFile, is_model_path, model_file
from shmserve.settings.flag import ENVIRONMENT, Flag
from shmserve.settings.limits import GATEWAY_LIMITS
from shmserve.settings.table import BY_NAME, FLAGS, PASSED_ON, completions, nearest, unknown, written
from shmserve.settings.triton_flags import notes, refusals
from shmserve.system.polling import MIN_CORES, POLL_NS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SETTLE_S = 1.0
"""Longest value of `settle_s`."""
_OF_GATEWAYS = frozenset(limit.name for limit in GATEWAY_LIMITS)
_OTHER_VARIABLES = frozenset(
    f"SHMSERVE_{name}" for name in ("URL", "SERVER_KEY", "KEY_FILE", "THREADS", "REWRITE", "EXPLORE")
)
"""Variables that are not for the server, besides those for models, which begin with SHMSERVE_MODEL_."""
_MODEL_PREFIX = "SHMSERVE_MODEL_"
_MISSPELLING = 0.9
"""Similarity from which a variable for models is reported as a misspelled server variable."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The settings, as attributes named after the flags, with underscores. `warnings` and `notes` are texts for the
    log; `failed` contains the reasons for serving no models.

    On errors exits with code 2 and lists them.
    """
    flag_parser = parser()
    from_flags, rest = flag_parser.parse_known_args(_separate_files(argv))
    if "help_all" in from_flags:
        sys.stdout.write(flag_parser.format_all())
        flag_parser.exit()
    arguments = _without_flag_values(rest)
    problems = [_unknown_flag(word) for word in arguments if word.startswith("-")]
    folders, files = _positional([word for word in arguments if not word.startswith("-")], problems)
    from_variables, warnings = _environment(os.environ, problems)
    config = vars(from_flags).get("config", from_variables.get("config"))
    from_file = _file(config, problems) if config is not None else {}
    chosen: dict[str, Any] = {}
    for source, where in ((from_file, str(config)), (from_variables, "the environment"), (vars(from_flags), "")):
        warnings += _move_deprecated(source, where)
        chosen |= source
    values = _defaults(chosen.get("triton_compatible", False)) | chosen
    values["model_repository"] = [*values["model_repository"], *folders]
    remote = [place for place in values["model_repository"] if isinstance(place, RemoteAddress)]
    values["model_repository"] = [place for place in values["model_repository"] if not isinstance(place, RemoteAddress)]
    settings = argparse.Namespace(
        **values,
        remote_repositories=list(dict.fromkeys(remote)),
        model_files=files,
        warnings=warnings,
        notes=notes(values),
    )
    settings.failed = _missing_repositories(settings, "exit_on_error" in chosen, problems)
    warnings += _missing_directories(settings)
    _check(settings, problems)
    if problems:
        flag_parser.error("\n  ".join(problems) if len(problems) == 1 else "\n  " + "\n  ".join(problems))
    if settings.runtime_dir is None:
        settings.runtime_dir = server_runtime_dir()
    if access(settings).for_others and settings.socket_group is None:
        text = "--access has rules for other users, but without --socket-group they cannot connect"
        settings.warnings.append(text)
    return settings


def _defaults(compatible: bool) -> dict[str, Any]:
    """The defaults. `compatible`: use Triton's where they differ."""
    flags = [flag for flag in FLAGS if not flag.replaced_by]
    defaults = {flag.dest: flag.unset if flag in PASSED_ON else copy(flag.default) for flag in flags}
    if compatible:
        defaults |= {flag.dest: flag.compatible for flag in flags if flag.compatible is not None}
    return defaults


def _missing_repositories(settings: argparse.Namespace, is_given: bool, problems: list[str]) -> list[str]:
    """Adds missing repositories, and directories that are not repositories, to `problems`. With an explicit
    --exit-on-error=false, returns them instead: then the server runs without models, as Triton does."""
    texts = [text for root in settings.model_repository if (text := _not_a_repository(root))]
    if is_given and not settings.exit_on_error:
        return texts
    problems += texts
    return []


def _missing_directories(settings: argparse.Namespace) -> list[str]:
    """Warns of directories of backends and agents that do not exist, and ignores them: as in Triton, whose documented
    commands name them everywhere, they do not prevent the start."""
    warnings = []
    for name in ("backend-directory", "repoagent-directory"):
        flag = BY_NAME[name]
        path = getattr(settings, flag.dest)
        if path is not None and not path.exists():
            setattr(settings, flag.dest, None)
            warnings.append(f"--{name} {path} does not exist and is ignored")
    return warnings


def _not_a_repository(root: Path) -> str:
    if not root.is_dir():
        return f"--model-repository {root} is not a directory"
    repository = repository_of(root)
    if repository is None:
        return ""
    words = f"--model-repository {shlex.quote(str(repository))}"
    return (
        f"{root} is the directory of one model, not a repository. Serve its parent: {words}; or only this model of it: "
        f"{words} --model-control-mode explicit --load-model {shlex.quote(root.resolve().name)}"
    )


def access(settings: argparse.Namespace, gateways: Container[int] = ()) -> AccessRules:
    """The table of roles. `gateways`: the pids of the server's gateways, as they change."""
    return AccessRules(settings.access, settings.socket_group, gateways)


def limits(settings: argparse.Namespace) -> Limits:
    """The core's limits, from --limit and from flags. If a limit is repeated, the last value counts."""
    otel = otel_settings(settings.trace_config, settings.triton_compatible)
    return Limits(
        loading=settings.model_load_thread_count,
        load_retries=settings.model_load_retry_count,
        crashes=settings.crash_limit,
        execution_ns=round(settings.execution_limit_secs * 1e9),
        load_ns=round(settings.load_limit_secs * 1e9),
        idle_unload_ns=round(settings.idle_unload_secs * 1e9),
        memory_budget=settings.model_memory_budget,
        gpu_budgets=tuple(settings.gpu_memory_budget),
        exit_ns=round(settings.exit_timeout_secs * 1e9),
        cache_bytes=settings.cache_config or settings.response_cache_byte_size,
        rate_limit=settings.rate_limit == "execution_count",
        resources=tuple(settings.rate_limit_resource),
        summaries=metrics(settings).summary_latencies,
        first_responses=metrics(settings).histogram_latencies,
        contexts_per_second=otel.contexts_per_second if otel is not None else 0,
        **{name: value for name, value in settings.limit if name not in _OF_GATEWAYS},
    )


def metrics(settings: argparse.Namespace) -> MetricSettings:
    """The settings of metrics. If one is repeated, its last value counts."""
    options = dict(settings.metrics_config)
    return MetricSettings(**options, cpu=settings.allow_cpu_metrics, interval_s=metrics_interval_s(settings))


def metrics_interval_s(settings: argparse.Namespace) -> float:
    return settings.metrics_interval_ms / 1000 or INTERVAL_S


def busy_poll_ns(cores: CoreSet) -> int:
    """The polling time: 0 if fewer than MIN_CORES cores can be used, counting a CPU quota."""
    count = min(len(cores.usable), cores.quota or len(cores.usable))
    return POLL_NS if count >= MIN_CORES else 0


def backend_settings(settings: argparse.Namespace) -> dict[str, str]:
    """Settings for workers: 'backend,key' -> value, ',key' -> value for all backends, and limits of the workers."""
    worker_settings = dict(settings.backend_config)
    worker_settings[LANE_ADDRESS] = f"unix://{settings.runtime_dir.absolute() / LANE}"
    worker_settings[OUTPUT_LIMIT] = str(settings.worker_output_bytes)
    worker_settings[PINNED_LIMIT] = str(settings.pinned_memory_pool_byte_size)
    if settings.cuda_memory_pool_byte_size:
        worker_settings[CUDA_POOL_LIMIT] = ",".join(
            f"{gpu}:{size}" for gpu, size in settings.cuda_memory_pool_byte_size
        )
    if settings.disable_auto_complete_config:
        worker_settings[NO_COMPLETION] = "true"
    if settings.backend_directory is not None:
        worker_settings[DIRECTORY] = str(settings.backend_directory.absolute())
    if settings.log_verbose:
        worker_settings[VERBOSE] = str(settings.log_verbose)
    return worker_settings


def agent_settings(settings: argparse.Namespace) -> AgentSettings:
    directory = settings.repoagent_directory
    return AgentSettings(
        str(directory.absolute()) if directory is not None else "",
        dict(settings.repoagent_config),
        tuple(settings.require_repoagent),
        settings.load_limit_secs,
    )


def remote_settings(settings: argparse.Namespace) -> RemoteSettings:
    return RemoteSettings(
        tuple(settings.remote_repositories),
        _cache_directory(settings) / "remote",
        settings.remote_cache_size,
        settings.repository_poll_secs if settings.model_control_mode == "poll" else 0.0,
        settle_s(settings),
    )


def settle_s(settings: argparse.Namespace) -> float:
    """For this time, the files of a changed model must not change before it is loaded, so that no half-copied model
    is."""
    return float(min(SETTLE_S, settings.repository_poll_secs))


def worker_defaults(settings: argparse.Namespace) -> WorkerResources:
    """Defaults for worker processes; models may override them."""
    return WorkerResources(
        settings.instance_memory_limit,
        unpacked=str(_cache_directory(settings) / "environments"),
        gpu_memory=settings.instance_gpu_memory_limit,
    )


def _cache_directory(settings: argparse.Namespace) -> Path:
    return Path(settings.cache_directory or cache_dir(settings.runtime_dir)).absolute()


def gateway_settings(settings: argparse.Namespace, busy_poll_ns: int = 0) -> GatewaySettings:
    """The gateways to start."""
    if settings.no_gateway:
        return GatewaySettings(0, ())
    options = {flag.name: getattr(settings, flag.dest) for flag in PASSED_ON if _is_passed_on(flag, settings)}
    gateway_limits = {name: value for name, value in settings.limit if name in _OF_GATEWAYS}
    if settings.triton_compatible:
        gateway_limits.setdefault("http_json_bytes", 0)
    options["limit"] = [f"{name}={value}" for name, value in gateway_limits.items()]
    if busy_poll_ns:
        options["busy-poll-ns"] = busy_poll_ns
    return GatewaySettings(settings.gateways, arguments_of(options))


def _is_passed_on(flag: Flag, settings: argparse.Namespace) -> bool:
    """Whether to pass the flag to gateways: it was set, and not to a false that is the default."""
    value = getattr(settings, flag.dest)
    return not (value is None or value == [] or (value is False and flag.default is False))


def host_policies(settings: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """The CPU cores of each host policy."""
    return cpus.resolve(settings.host_policy)


# ------------------------------------------------------------------------------------------- the command line


def _without_flag_values(rest: Sequence[str]) -> list[str]:
    """Omits words after unknown flags, which are probably their values."""
    return [word for at, word in enumerate(rest) if word.startswith("-") or not at or not _is_bare(rest[at - 1])]


def _is_bare(word: str) -> bool:
    return word.startswith("--") and "=" not in word


def _separate_files(argv: Sequence[str]) -> list[str]:
    """Replaces a boolean flag before a file with FLAG=true, so that the file is not parsed as the flag's value. Flags
    may be abbreviated, as in Triton."""
    words = [_completed(word) for word in argv]
    for index, word in enumerate(words[:-1]):
        flag = BY_NAME.get(word.removeprefix("--")) if word.startswith("--") else None
        if flag is not None and flag.kind == "boolean" and Path(argv[index + 1].rpartition("=")[2]).exists():
            words[index] = f"{word}=true"
    return words


def _completed(word: str) -> str:
    """The word with its flag written out, if only one flag begins like this."""
    name, equals, value = word.partition("=")
    names = completions(name[2:]) if name.startswith("--") else []
    return f"--{names[0]}{equals}{value}" if len(names) == 1 else word


def _positional(words: Sequence[str], problems: list[str]) -> tuple[list[Path | RemoteAddress], list[ModelFile]]:
    """The repositories and the model files that are given without a flag."""
    folders: list[Path | RemoteAddress] = []
    files = []
    for word in words:
        try:
            if is_remote(word):
                folders.append(parse_address(word))
            elif word and Path(word).is_dir() and not is_model_path(Path(word)):
                folders.append(Path(word))
            else:
                files.append(model_file(word))
        except InvalidRequest as error:
            problems.append(str(error))
    return folders, files


def _unknown_flag(word: str) -> str:
    shown = word.partition("=")[0]
    if shown.startswith("--") and (names := completions(shown[2:])):
        return f"{shown} is ambiguous; it could be {', '.join(f'--{name}' for name in names)}"
    return unknown(shown.lstrip("-"), shown)


# ------------------------------------------------------------------------------------------- environment and file


def _environment(environment: Mapping[str, str], problems: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The values, and warnings about unknown variables. They are not errors, as an orchestrator may set variables with
    the same prefix for a service with this server's name."""
    values: dict[str, Any] = {}
    warnings: list[str] = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT) or variable in _OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENVIRONMENT).lower().replace("_", "-")
        flag = BY_NAME.get(name)
        if flag is not None and not flag.private:
            if text:
                _set_value(values, flag, partial(from_environment, flag, text), problems, variable)
        elif not variable.startswith(_MODEL_PREFIX):
            warnings.append(unknown(name, variable, ENVIRONMENT))
        elif close := nearest(name, _MISSPELLING):
            warnings.append(f"{variable} is for models; did you mean {ENVIRONMENT}{written(close, ENVIRONMENT)}?")
    return values, warnings


def _file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"is not TOML: {error}"
        problems.append(f"--config {path}: {why}")
        return {}
    values: dict[str, Any] = {}
    for key, value in tables.items():
        flag = BY_NAME.get(key)
        if flag is None or flag.private:
            problems.append(f"{path}: {unknown(key, key, '')}")
        elif flag.name == "config":
            problems.append(f"{path}: config cannot be set in the file itself")
        else:
            _set_value(values, flag, partial(from_toml, flag, value, path.parent), problems, f"{path}: {key}")
    return values


def _set_value(values: dict[str, Any], flag: Flag, read: Callable[[], Any], problems: list[str], where: str) -> None:
    try:
        value = read()
    except ValueError as error:
        problems.append(f"{where}: {error}")
        return
    # A flag and its alias may both be given. Merge the values if the flag is repeatable.
    values[flag.dest] = [*values.get(flag.dest, ()), *value] if flag.repeatable else value


# ------------------------------------------------------------------------------------------- checks and deprecation


def _move_deprecated(source: dict[str, Any], where: str) -> list[str]:
    """Moves values of deprecated flags to their replacements, and returns warnings."""
    warnings = []
    for flag in FLAGS:
        if flag.replaced_by and flag.dest in source:
            value, now = source.pop(flag.dest), BY_NAME[flag.replaced_by]
            if now.repeatable:
                source[now.dest] = [*value, *source.get(now.dest, ())]
            else:
                source.setdefault(now.dest, value)
            at = f" (in {where})" if where else ""
            use = f"--{flag.replaced_by} {flag.setting}=" if flag.setting else f"--{flag.replaced_by}"
            warnings.append(f"--{flag.name} is deprecated{at}; use {use}")
    return warnings


def _check(settings: argparse.Namespace, problems: list[str]) -> None:
    wrong = problems.append
    problems += refusals(vars(settings))
    problems += [fault for address in settings.remote_repositories if (fault := missing_package(address))]
    if not (settings.model_repository or settings.remote_repositories or settings.model_files or problems):
        wrong("nothing to serve: give a model file, or the directory that holds the models with --model-repository")
    if settings.model_namespacing:
        names = [namespace(root) for root in settings.model_repository]
        if settings.remote_repositories or len(set(names)) < len(names):
            wrong("--model-namespacing needs local repositories, in directories with different names")
    if settings.backend_directory is not None:
        if fault := backend_directory_problem(settings.backend_directory):
            wrong(f"--backend-directory {fault}")
    if settings.repoagent_directory is not None:
        if fault := directory_problem(settings.repoagent_directory):
            wrong(f"--repoagent-directory {fault}")
    if settings.cache_config and settings.response_cache_byte_size:
        wrong(
            "Incompatible flags --response-cache-byte-size and --cache-config both provided. Please provide one or the "
            "other."
        )
    if settings.load_model and settings.model_control_mode != "explicit":
        wrong(
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well; the mode is "
            f"{settings.model_control_mode}"
        )
    if "*" in settings.load_model and len(settings.load_model) > 1:
        wrong(
            "Wildcard model name '*' must be the ONLY startup model if specified at all; --load-model was given "
            f"{len(settings.load_model)} times"
        )
    if not re.fullmatch(r"[^/\x00]*", settings.model_config_name) or settings.model_config_name in (".", ".."):
        wrong(f"--model-config-name {settings.model_config_name}: expected a file name without .pbtxt")
    if not settings.id.isprintable() or len(settings.id) > 128:
        wrong("--id must have at most 128 printable characters")
    try:
        cpus.resolve(settings.host_policy)
    except ValueError as error:
        wrong(f"--host-policy: {error}")
