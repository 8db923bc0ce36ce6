"""Loads the shim and a backend's library into this process, and calls them.

Invariant: the shim is loaded before the backend, under the name that the backend is linked with, so that the dynamic
linker binds the backend to it and never looks for Triton's own library. Neither is ever unloaded.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shmserve.dtypes import BY_NUMBER
from shmserve.errors import InvalidRequest, ServeError, Unsupported, from_wire
from shmserve.repo.files.elf import read_library
from shmserve.repo.files.native_library import EXECUTE, SERVER_LIBRARY, library_problem
from shmserve.workers.backends.native.build import shim
from shmserve.workers.backends.native.compiler import SONAME
from shmserve.workers.model_calls.answer import triton_code
from shmserve.workers.process.device import visible_number

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelInstanceGroup, ModelSequenceBatchingState
    from shmserve.workers.process.device import Device

KINDS = ("AUTO", "CPU", "GPU", "MODEL")
_WITHOUT_THREADS = (SERVER_LIBRARY, "ld-linux", "libc.", "libgcc_s.", "libm.", "libpthread.", "libstdc++.")
"""Libraries that start no threads by themselves."""
_STARTS_THREAD = re.compile(r"^(pthread_create|thrd_create|clone3?|_ZNSt6thread\w*)$")

_Texts = POINTER(c_char_p)
_CALLBACKS: dict[str, Any] = {
    "notify": CFUNCTYPE(None),
    "place": CFUNCTYPE(c_uint64, c_uint64, c_uint64, c_uint32, c_uint64, POINTER(c_int64), c_uint64, POINTER(c_int)),
    "allocate": CFUNCTYPE(c_uint64, c_int, c_uint64),
    "deallocate": CFUNCTYPE(c_bool, c_int, c_uint64),
    "cancelled": CFUNCTYPE(c_int, c_uint64),
    "metric": CFUNCTYPE(c_uint64, c_int, c_char_p, c_char_p, c_uint64, _Texts, c_uint64, POINTER(c_double)),
    "infer": CFUNCTYPE(c_int64, c_uint64, c_uint64, c_uint64),
    "cancel": CFUNCTYPE(None, c_uint64),
    "ask": CFUNCTYPE(c_int64, c_int, c_char_p, c_int64, c_uint64, c_uint64, c_uint64),
}
_FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "host_set_backend": (None, (c_char_p, c_char_p, c_char_p)),
    "host_set_model": (None, (c_char_p, c_uint64, c_char_p, c_bool, c_char_p)),
    "host_set_config": (None, (c_char_p,)),
    "host_set_instance": (None, (c_char_p, c_int, c_int32, c_char_p, c_bool)),
    "host_set_verbose": (None, (c_bool,)),
    "host_set_callbacks": (None, (c_void_p,)),
    "host_set_tensors": (
        None,
        (c_bool, c_uint32, _Texts, POINTER(c_int32), c_uint32, _Texts, POINTER(c_int32)),
    ),
    "host_set_states": (None, (c_uint32, _Texts, _Texts, POINTER(c_bool))),
    "host_set_execute": (None, (c_void_p,)),
    "host_config": (c_char_p, ()),
    "host_backend": (c_void_p, ()),
    "host_model": (c_void_p, ()),
    "host_instance": (c_void_p, ()),
    "host_execute": (c_void_p, (c_void_p, c_uint32)),
    "host_execute_alike": (c_void_p, (c_uint64, c_uint32, c_void_p, c_uint64, c_void_p, c_uint64)),
    "host_alike": (c_void_p, (c_uint64, c_uint32, c_void_p, POINTER(c_uint64))),
    "host_collect": (None, (c_uint32, c_uint32, c_void_p)),
    "host_collected": (None, ()),
    "host_take": (c_void_p, (POINTER(c_uint64),)),
    "host_taken": (None, ()),
    "host_reply": (None, (c_uint64, c_void_p, c_uint32)),
    "host_end_call": (None, (c_uint64,)),
    "host_refuse": (None, (c_int, c_char_p)),
    "TRITONSERVER_ErrorCode": (c_int, (c_void_p,)),
    "TRITONSERVER_ErrorMessage": (c_char_p, (c_void_p,)),
    "TRITONSERVER_ErrorDelete": (None, (c_void_p,)),
}


class _Callbacks(Structure):
    _fields_ = list(_CALLBACKS.items())


class NativeLibrary:
    """The library of a backend, and the shim. There is one in a process."""

    def __init__(self, path: Path) -> None:
        linked = read_library(path)
        others = [name for name in linked.needed if not name.startswith(_WITHOUT_THREADS)]
        self.may_have_threads = bool(others) or any(map(_STARTS_THREAD.search, linked.undefined))
        """Whether the backend may act in threads of its own."""
        if problem := library_problem(linked):
            raise Unsupported(f"'{path.name}' {problem}")
        self.host = _load_shim(shim(), next((name for name in linked.needed if name.startswith(SERVER_LIBRARY)), ""))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self.host, name)
            function.restype, function.argtypes = result, arguments
        try:
            self._backend = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise InvalidRequest(f"'{path.name}' cannot be loaded: {error}") from None
        execute = ctypes.cast(getattr(self._backend, EXECUTE), c_void_p)
        self.host.host_set_execute(execute)
        self._callbacks: dict[str, Any] = {}

    def set_callbacks(self, **callbacks: Any) -> None:
        """Sets functions that the shim calls, by their name in `host.h`. The others stay."""
        self._callbacks |= {name: _CALLBACKS[name](function) for name, function in callbacks.items()}
        self.host.host_set_callbacks(ctypes.byref(_Callbacks(**self._callbacks)))

    def has(self, function: str) -> bool:
        return hasattr(self._backend, f"TRITONBACKEND_{function}")

    def call(self, function: str, subject: int) -> None:
        """Calls a function of the life cycle, if the backend has it. Raises the error that it returns."""
        if not self.has(function):
            return
        called = getattr(self._backend, f"TRITONBACKEND_{function}")
        called.restype, called.argtypes = c_void_p, (c_void_p,)
        if error := called(subject):
            raise self.taken_error(error)

    def taken_error(self, error: int) -> ServeError:
        """Returns an error of the interface as ours, and deletes it."""
        code, text = self.host.TRITONSERVER_ErrorCode(error), self.host.TRITONSERVER_ErrorMessage(error)
        taken = from_wire(triton_code(code), text.decode(errors="backslashreplace"))
        self.host.TRITONSERVER_ErrorDelete(error)
        return taken

    def set_instance(self, name: str, device: Device, group: ModelInstanceGroup | None) -> None:
        """Sets the properties of the instance. Its process sees one GPU, so the GPU's number may differ there."""
        number = visible_number(device.number)
        policy = (group.host_policy if group is not None else "") or (
            f"gpu_{number}" if device.kind == "GPU" else device.kind.lower()
        )
        passive = group is not None and group.passive
        kind = KINDS.index(device.kind)
        self.host.host_set_instance(name.encode(), kind, number, msgspec.json.encode({policy: {}}), passive)

    def set_tensors(self, decoupled: bool, *tables: Sequence[tuple[str, str]]) -> None:
        """Sets name and data type of the inputs and of the outputs."""
        arguments: list[Any] = [decoupled]
        for table in tables:
            names = (c_char_p * len(table))(*(name.encode() for name, _ in table))
            types = (c_int32 * len(table))(*(BY_NUMBER.index(dtype) for _, dtype in table))
            arguments += [len(table), names, types]
        self.host.host_set_tensors(*arguments)

    def set_states(self, states: Sequence[ModelSequenceBatchingState]) -> None:
        count = len(states)
        inputs = (c_char_p * count)(*(state.input_name.encode() for state in states))
        outputs = (c_char_p * count)(*(state.output_name.encode() for state in states))
        shared = (c_bool * count)(*(state.use_same_buffer_for_input_output for state in states))
        self.host.host_set_states(count, inputs, outputs, shared)


def _load_shim(image: bytes, name: str) -> ctypes.CDLL:
    """Loads the shim under the name that the backend needs. A backend that is linked with no such library finds its
    functions among the global ones."""
    wanted, soname = name.encode(), SONAME.encode()
    if len(wanted) > len(soname):
        raise Unsupported(f"the backend is linked with '{name}', a name of more than {len(soname)} bytes")
    if wanted:
        image = image.replace(soname, wanted.ljust(len(soname), b"\0"))
    descriptor = os.memfd_create("shmserve-native-shim", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(image)
        mode = os.RTLD_NOW | (os.RTLD_LOCAL if wanted else os.RTLD_GLOBAL)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=mode)
    finally:
        os.close(descriptor)
