"""All problems of all models of repositories, as far as they can be detected without running a model.

Invariant: models are judged as by the server, by the same scan; findings that only this check makes are added to those.
One broken model does not hide the problems of others.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.protocol.namespaces import namespace, qualified, resolved
from shmserve.repo.backends import installed
from shmserve.repo.config.complete import complete, is_ensemble, needs_completion
from shmserve.repo.config.outline import escaped
from shmserve.repo.config.problems import Problem, place_of
from shmserve.repo.config.schema import ModelConfig, ModelRepositoryAgents, ModelVersionPolicy
from shmserve.repo.rules.ensembles import StepModel, check_graph
from shmserve.repo.rules.fields import completion_warnings, unknown_policies
from shmserve.repo.storage.layout import (
    ERROR,
    MODEL_DIRECTORY,
    WARNING,
    LayoutFinding,
    inspect_model,
    inspect_root,
    is_model,
    may_complete_itself,
    repository_of,
)
from shmserve.repo.storage.model_files import TARGETS
from shmserve.repo.storage.store import (
    ScannedModel,
    check_config_name,
    model_names,
    resembles_model,
    scan_model,
    select_versions,
)

_UNREADABLE = "cannot be read: "
MANY = 3
"""Directories from which a repository without any model is taken for something else. With fewer, each has errors."""


class CheckFinding(NamedTuple):
    """One problem: `severity` is error or warning.

    `model` is "" for a repository itself. `file` is relative to `repository`; line and column start at 1, or are 0.
    `path` is a field of the configuration. `hint` is a remedy that the text does not mention. `log` holds a worker's
    last lines.
    """

    model: str
    severity: str
    repository: Path
    file: str
    line: int
    column: int
    path: str
    text: str
    hint: str = ""
    log: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The file's path, and the line, in the form that editors open."""
        file = str(self.repository / self.file)
        return f"{file}:{self.line}:{self.column}" if self.line else file

    @property
    def relative(self) -> str:
        """One line of text, without the repository's path."""
        return str(Problem(self.file, self.line, self.column, self.path, self.text))


class CheckedModel(NamedTuple):
    """A model and its findings. The server knows it by its `full_name`. `versions` are those that would be served,
    `groups` the names of its instance groups.
    """

    name: str
    full_name: str
    repository: Path
    ensemble: bool
    versions: tuple[int, ...]
    groups: tuple[str, ...]
    findings: tuple[CheckFinding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.severity == ERROR for finding in self.findings)


class Checked(NamedTuple):
    """The result of a check. `findings` are those of the repositories themselves."""

    models: tuple[CheckedModel, ...]
    findings: tuple[CheckFinding, ...]

    def all(self) -> list[CheckFinding]:
        return [*self.findings, *(finding for model in self.models for finding in model.findings)]

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.all())


def check(
    roots: Sequence[Path],
    *,
    backends: Collection[str] | None = None,
    gpus: Collection[int] = (),
    directory: str | Path = "",
    config_name: str = "",
    completed: Mapping[str, ModelConfig] | None = None,
    policies: Collection[str] | None = None,
    namespacing: bool = False,
) -> Checked:
    """All problems of the repositories. Raises InvalidRequest for a root that is not a directory, or a bad config_name.

    `backends` are those of the server, by default the installed ones; `gpus` are its devices. `directory`: its
    --backend-directory. `completed` has the final configurations of models that were loaded, by their full names, so
    that ensembles can be checked completely. `policies`: the names of its host policies; None: unknown. `namespacing`:
    each repository is a namespace.
    """
    if config_name:
        check_config_name(config_name)
    for root in roots:
        if not root.is_dir():
            raise InvalidRequest(_not_a_directory(root))
    different = {root.resolve(): namespace(root) for root in roots}
    if namespacing and len(set(different.values())) < len(different):
        raise InvalidRequest("--model-namespacing needs repositories in directories with different names")
    host = frozenset(backends) if backends is not None else installed()
    repositories = _RepositoryCheck(host, gpus, directory, config_name, completed or {}, policies, namespacing)
    seen: set[Path] = set()
    for root in roots:
        if root.resolve() not in seen:
            seen.add(root.resolve())
            repositories.add_root(root)
    return repositories.done()


def _not_a_directory(root: Path) -> str:
    text = f"{root} is not a directory; `shmserve check` takes model repositories, with a directory for each model"
    if not root.is_file():
        return text
    repository = repository_of(root)
    if repository is not None:
        return f"{text}. The repository of this model: shmserve check {shlex.quote(str(repository))}"
    if root.suffix in TARGETS:
        name = shlex.quote(str(root))
        return f"{text}. `shmserve serve {name}` serves a file, and says what is wrong with it"
    return text


class _ModelCheck:
    """A model being checked. `numbers` are the versions that the policy selects, valid or not."""

    def __init__(self, root: Path, scanned: ScannedModel, config: ModelConfig | None, numbers: tuple[int, ...]) -> None:
        self.root = root
        self.scanned = scanned
        self.config = config
        self.numbers = numbers
        self.findings: list[CheckFinding] = []

    @property
    def ensemble(self) -> bool:
        return self.config is not None and is_ensemble(self.config)

    def add(self, severity: str, problem: Problem, hint: str = "") -> None:
        file = problem.file.removesuffix(" (no config.pbtxt)")
        place = (file, problem.line, problem.column, problem.path)
        self.findings.append(CheckFinding(self.scanned.name, severity, self.root, *place, problem.text, hint))

    def add_finding(self, seen: LayoutFinding) -> None:
        if seen.path:
            line, column = place_of(seen.path, self.scanned.places)
            file = f"{self.scanned.name}/{self.scanned.file}" if self.scanned.file else self.scanned.name
        else:
            line, column, file = seen.line, seen.column, seen.file
        self.add(seen.severity, Problem(file, line, column, seen.path, seen.text), seen.hint)

    def has(self, path: str) -> bool:
        return any(finding.path == path for finding in self.findings)

    def errors(self) -> int:
        return sum(finding.severity == ERROR for finding in self.findings)

    def done(self, full_name: str) -> CheckedModel:
        findings = sorted(self.findings, key=lambda finding: (finding.file, finding.line, finding.column))
        sound = tuple(number for number in self.numbers if number not in self.scanned.missing)
        groups = tuple(group.name for group in self.config.instance_group) if self.config is not None else ()
        return CheckedModel(self.scanned.name, full_name, self.root, self.ensemble, sound, groups, tuple(findings))


class _RepositoryCheck:
    def __init__(
        self,
        backends: Collection[str],
        gpus: Collection[int],
        directory: str | Path,
        config_name: str,
        completed: Mapping[str, ModelConfig],
        policies: Collection[str] | None,
        namespacing: bool,
    ) -> None:
        self._backends = backends
        self._gpus = gpus
        self._directory = directory
        self._config_name = config_name
        self._completed = completed
        self._policies = policies
        self._namespacing = namespacing
        self._findings: list[CheckFinding] = []
        self._models: list[_ModelCheck] = []

    def add_root(self, root: Path) -> None:
        other = _not_a_repository(root)
        if other is not None:
            self._findings.append(other)
            return
        self._findings += repository_findings(root)
        with contextlib.suppress(OSError, InvalidRequest):  # already among the findings
            if not is_model(root):
                for paths in model_names([root]).values():
                    self._models.append(self._check_model(root, paths[0]))

    def _check_model(self, root: Path, path: Path) -> _ModelCheck:
        scanned = scan_model(path, backends=self._backends, gpus=self._gpus, config_name=self._config_name)
        model = _check_files(root, scanned, self._backends, self._gpus, self._directory)
        final = self._completed.get(self._full_name(model))
        if final is not None and scanned.written is not None:
            for text in completion_warnings(scanned.written, final):
                model.add_finding(LayoutFinding(WARNING, "", text, path="max_batch_size"))
        if self._policies is not None and scanned.config is not None:
            for name in unknown_policies(scanned.config, self._policies):
                text = f"unknown host policy '{name}': its instances use all cores"
                model.add_finding(LayoutFinding(WARNING, "", text, path="instance_group", hint="see --host-policy"))
        return model

    # ------------------------------------------------------------------------------------------- across models

    def done(self) -> Checked:
        if not self._namespacing:
            self._add_duplicates()
        members = self._members()
        for model in self._models:
            if not model.ensemble or model.config is None:
                continue
            for problem in check_graph(self._with_full_names(self._full_name(model), model.config), members):
                model.add_finding(LayoutFinding(ERROR, "", problem.text, path=problem.path))
        models = sorted(self._models, key=lambda model: (model.scanned.name, str(model.root)))
        return Checked(tuple(model.done(self._full_name(model)) for model in models), tuple(self._findings))

    def _add_duplicates(self) -> None:
        roots: dict[str, list[Path]] = {}
        for model in self._models:
            roots.setdefault(model.scanned.name, []).append(model.root)
        for model in self._models:
            name = model.scanned.name
            others = [str(root) for root in roots[name] if root != model.root]
            if others:
                text = f"model appears in two or more repositories: '{name}' is also in {', '.join(others)}"
                hint = "none of them is served; keep one, or rename a directory"
                model.add(ERROR, Problem(name, 0, 0, "", text), hint)

    def _members(self) -> Mapping[str, StepModel]:
        members: dict[str, StepModel] = {}
        for model in self._models:
            errors, full_name = model.errors(), self._full_name(model)
            reason = f"it has {errors} problem{'s' if errors > 1 else ''} itself" if errors else ""
            final = self._completed.get(full_name)
            config = final or model.config
            if config is not None:
                config = self._with_full_names(full_name, config)
            member = StepModel(config, model.numbers, reason, final is not None or _is_final(model))
            members.setdefault(full_name, member)
        return members

    def _with_full_names(self, full_name: str, config: ModelConfig) -> ModelConfig:
        """The configuration, whose steps have the full names of their models if it is one of an ensemble."""
        if config.ensemble_scheduling is None or not self._namespacing:
            return config
        steps = tuple(
            replace(step, model_name=self._resolved(step.model_name, full_name))
            for step in config.ensemble_scheduling.step
        )
        return replace(config, ensemble_scheduling=replace(config.ensemble_scheduling, step=steps))

    def _full_name(self, model: _ModelCheck) -> str:
        name = model.scanned.name
        return qualified(namespace(model.root), name) if self._namespacing else name

    def _resolved(self, name: str, near: str) -> str:
        known = [self._full_name(model) for model in self._models if model.scanned.name == name]
        return resolved(name, near, known or [name])


def _not_a_repository(root: Path) -> CheckFinding | None:
    """One error for a directory with many other directories and no model, such as one of source code."""
    try:
        folders = [] if is_model(root) else [path for paths in model_names([root]).values() for path in paths]
        if len(folders) < MANY or any(map(resembles_model, folders)):
            return None
    except (OSError, InvalidRequest):
        return None  # a finding of its own, about the repository or the model
    text = f"not a model repository: none of its {len(folders)} directories has a config.pbtxt or a version directory"
    hint = "give the directory that contains the models: NAME/config.pbtxt and NAME/1/"
    return CheckFinding("", ERROR, root, "", 0, 0, "", text, hint)


def repository_findings(root: Path) -> list[CheckFinding]:
    """All findings about a repository itself, apart from its models."""
    seen = []
    try:
        if is_model(root):
            text = "this is a model directory; a repository is its parent"
            seen = [LayoutFinding(ERROR, "", text, f"check its parent: {root.resolve().parent}")]
        else:
            seen = inspect_root(root)
            if not model_names([root]):
                seen.append(LayoutFinding(WARNING, "", "it contains no models", MODEL_DIRECTORY))
    except (OSError, InvalidRequest) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        seen.append(LayoutFinding(ERROR, "", f"{_UNREADABLE}{why}", "the server's user must be able to read it"))
    return [CheckFinding("", one.severity, root, one.file, 0, 0, "", one.text, one.hint) for one in seen]


def load_warnings(
    scanned: ScannedModel, *, backends: Collection[str], gpus: Collection[int], prepared: bool
) -> tuple[CheckFinding, ...]:
    """What a server logs when it loads the model: all warnings of a check, and versions that are left out. Errors fail
    the load and are reported by that. `prepared`: its repository agents have run.
    """
    model = _check_files(scanned.path.parent, scanned, backends, gpus, prepared=prepared, warnings_only=True)
    warnings = set(scanned.warning_texts)
    return tuple(
        finding
        for finding in model.done(scanned.name).findings
        if finding.severity == WARNING or finding.relative in warnings
    )


def _check_files(
    root: Path,
    scanned: ScannedModel,
    backends: Collection[str],
    gpus: Collection[int],
    directory: str | Path = "",
    prepared: bool = False,
    warnings_only: bool = False,
) -> _ModelCheck:
    """All findings about a model on its own. `prepared`: its repository agents have run. `warnings_only`: as in
    `inspect_model`."""
    if scanned.written is not None and scanned.written.model_repository_agents and not prepared:
        return _check_agents(root, scanned, scanned.written.model_repository_agents)
    path, numbers, config = scanned.path, scanned.versions, None
    try:
        if not numbers:
            numbers = _selected_versions(path, scanned.written)
        config = scanned.config or _completed_anyway(scanned, numbers, backends, gpus)
        seen = inspect_model(path, config, numbers, directory, warnings_only)
    except OSError:  # already reported by the scan
        seen = []
    model = _ModelCheck(root, scanned, config, numbers)
    unreadable = any(one.text.startswith(_UNREADABLE) for one in seen)
    for problem in scanned.problems:
        if not (unreadable and problem.text.startswith(_UNREADABLE)):
            model.add(ERROR, problem)
    refused = [one.path for one in seen if one.severity == ERROR]
    for problem in scanned.warnings:
        if problem.path and any(path.startswith((f"{problem.path}.", f"{problem.path}[")) for path in refused):
            continue  # a field without effect, whose content is refused
        lacking = problem.file.rpartition("/")[2] in map(str, scanned.missing) and not problem.line
        model.add(ERROR if lacking else WARNING, problem)
    for one in seen:
        if not (one.path and model.has(one.path)):
            model.add_finding(one)
    return model


def _check_agents(root: Path, scanned: ScannedModel, used: ModelRepositoryAgents) -> _ModelCheck:
    """Checks a model with repository agents, which may put other files in place: only its configuration is checked."""
    model = _ModelCheck(root, scanned, None, scanned.versions)
    text = "its files are not checked: its repository agents check or replace them when it is loaded"
    names = ", ".join(escaped(agent.name, 100) for agent in used.agents)
    model.add_finding(LayoutFinding(WARNING, "", f"{text} ({names})", path="model_repository_agents"))
    return model


def _completed_anyway(
    scanned: ScannedModel, numbers: Sequence[int], backends: Collection[str], gpus: Collection[int]
) -> ModelConfig | None:
    """The completed configuration despite its problems."""
    if scanned.written is None:
        return None
    files = os.listdir(scanned.path / str(numbers[0])) if numbers else ()
    return complete(scanned.written, scanned.name, files, backends, gpus)


def _is_final(model: _ModelCheck) -> bool:
    if model.config is None or needs_completion(model.config):
        return False
    if model.config.backend == "python":
        return not may_complete_itself(model.scanned.path, model.numbers, model.config)
    return True


def _selected_versions(path: Path, written: ModelConfig | None) -> tuple[int, ...]:
    """The version directories selected by the policy."""
    policy = (written and written.version_policy) or ModelVersionPolicy()
    names: Iterable[str] = (entry.name for entry in os.scandir(path) if os.path.isdir(entry.path))
    numbers = [int(name) for name in names if name.isascii() and name.isdigit() and not name.startswith("0")]
    return select_versions(policy, numbers)


# ------------------------------------------------------------------------------------------------ JSON output


def as_json(checked: Checked) -> dict[str, Any]:
    """The result as plain values. Repository paths are as given."""
    return {
        "models": [
            {
                "name": model.name,
                "repository": str(model.repository),
                "ok": model.ok,
                "versions": list(model.versions),
                "problems": [_plain(finding) for finding in model.findings],
            }
            for model in checked.models
        ],
        "problems": [_plain(finding) for finding in checked.findings],
        "errors": checked.count(ERROR),
        "warnings": checked.count(WARNING),
    }


def _plain(finding: CheckFinding) -> dict[str, Any]:
    return {**finding._asdict(), "repository": str(finding.repository), "log": list(finding.log)}
