"""Where libraries for GPUs are named, and that GPU modules are imported only when a tensor on a GPU appears."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests import ROOT

PACKAGES = {"shmserve": ROOT / "shmserve", "shmserve.workers": ROOT / "workers", "shmserve.repo": ROOT / "repo"}
PACKAGES["shmserve.clients"] = ROOT / "clients"
GPU = ("shmserve.gpu", "shmserve.session.gpu", "shmserve.shm.extents.cuda", "shmserve.workers.gpu")
ONLY_ON_GPUS = (
    "shmserve.workers.backends.device_buffers",
    "shmserve.workers.backends.device_inputs",
    "shmserve.workers.backends.device_pipeline",
    "shmserve.workers.backends.python.pb_device",
    "shmserve.workers.backends.pytorch.gpu_batches",
    "shmserve.workers.backends.tensorrt",
)
"""Modules besides those of GPU that only processes with a GPU import."""
LIBRARIES = {
    "cupy": {"shmserve.gpu.runtime"},
    "tensorrt": {"shmserve.repo.agents.convert", "shmserve.workers.gpu.api"},
    "pynvml": {
        "shmserve.broker.processes.gpus.monitor",
        "shmserve.clients.load.analysis.usage",
        "shmserve.gateway.upstream.device_regions",
        "shmserve.repo.gpu_state",
        "shmserve.repo.gpus",
    },
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if "examples" in parts or "templates" in parts or (folder / parts[0]).is_symlink():
                continue
            yield ".".join((package, *parts)).removesuffix(".__init__"), ast.parse(path.read_bytes())


def named(node: ast.AST) -> list[str]:
    """The modules that a statement or a call of import_module imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__"):
            return [str(node.args[0].value)]
    return []


def is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported, except those for type checkers."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(statement.test):
                yield from at_import(statement.body)
            yield from at_import(statement.orelse)
        elif isinstance(statement, (ast.Try, ast.ClassDef)):
            yield from at_import(statement.body)
        else:
            yield statement


def test_libraries_are_named_only_by_the_implementations() -> None:
    found: dict[str, set[str]] = {name: set() for name in LIBRARIES}
    for module, tree in modules():
        for node in ast.walk(tree):
            for name in named(node):
                if (library := name.partition(".")[0]) in found:
                    found[library].add(module)
    assert found == LIBRARIES


def test_gpu_modules_are_imported_lazily() -> None:
    found = [
        f"{module} imports {name}"
        for module, tree in modules()
        if not is_in(module, (*GPU, *ONLY_ON_GPUS))
        for statement in at_import(tree.body)
        for name in named(statement)
        if is_in(name, (*GPU, *ONLY_ON_GPUS))
    ]
    assert found == []


def test_the_modules_exist() -> None:
    every = {module for module, _ in modules()}
    assert {*GPU, *ONLY_ON_GPUS} <= every
    assert "shmserve.workers.loop" in every
