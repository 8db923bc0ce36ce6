"""`@shmserve.model`, which turns a function or a class into a model, and the types of its tensors.

    import numpy as np
    import shmserve

    @shmserve.model(batch=True)
    def normalize(x: shmserve.Tensor["FP32", 3]) -> shmserve.Tensor["FP32", 3]:
        return x / np.linalg.norm(x, axis=1, keepdims=True)

`shmserve serve app.py` serves it. Invariant: the decorator does not change the function, which can be called as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar, overload

from shmserve.dtypes import ITEM_BYTES

MAX_BATCH = 32
"""The default of max_batch_size."""
_F = TypeVar("_F", bound=Callable[..., Any])


class ModelOptions(NamedTuple):
    """The arguments of the decorator."""

    name: str = ""
    batch: bool = False
    max_batch_size: int = 0
    instances: int = 1

    def checked(self) -> ModelOptions:
        """A copy with defaults filled in. Raises TypeError and ValueError."""
        for field, kind in (("name", str), ("batch", bool), ("max_batch_size", int), ("instances", int)):
            value = getattr(self, field)
            if type(value) is not kind:
                raise TypeError(f"{field}={value!r} is not {'text' if kind is str else f'of type {kind.__name__}'}")
        if self.max_batch_size and not self.batch:
            raise ValueError(f"max_batch_size={self.max_batch_size} needs batch=True")
        if self.max_batch_size < 0 or self.instances < 1:
            raise ValueError("max_batch_size and instances must be at least 1")
        return self._replace(max_batch_size=self.max_batch_size or MAX_BATCH) if self.batch else self


@overload
def model(function: _F, /) -> _F: ...


@overload
def model(
    *, name: str = ..., batch: bool = ..., max_batch_size: int = ..., instances: int = ...
) -> Callable[[_F], _F]: ...


def model(function: Any = None, /, **options: Any) -> Any:
    """Turns a function into a model that `shmserve serve FILE.py` serves; type hints describe its inputs and outputs.

    `name` is the model's name (default: the function's). With `batch`, a call gets up to `max_batch_size` (32) requests
    at once: each tensor has an additional first axis, and a list has an item for each row. `instances` is the number of
    processes. The options must be literals, as the server reads them without running the file.
    """
    ModelOptions(**options).checked()
    if function is None:
        return lambda function: function
    return function


class Tensor:
    """The type of an array: `Tensor["FP32", -1, 3]`, or `Annotated[np.ndarray, Tensor("FP32", -1, 3)]`, which type
    checkers understand. -1 means any size. With `batch=True`, the dims are those of one row.
    """

    __slots__ = ("dims", "dtype")

    def __init__(self, dtype: str, *dims: int) -> None:
        if dtype not in ITEM_BYTES:
            raise TypeError(f"Tensor has no data type {dtype!r}; expected one of {', '.join(ITEM_BYTES)}")
        if not all(type(dim) is int and (dim == -1 or dim > 0) for dim in dims):
            raise TypeError(f"Tensor has the dims {dims}; expected sizes above 0, or -1 for any size")
        self.dtype = dtype
        self.dims = dims

    def __class_getitem__(cls, item: Any) -> Any:
        import numpy as np

        return Annotated[np.ndarray, cls(*(item if isinstance(item, tuple) else (item,)))]

    def __repr__(self) -> str:
        return f"Tensor[{', '.join(map(repr, (self.dtype, *self.dims)))}]"
