"""Writes smaller ONNX files with ONNX Runtime's tools: 8-bit integers instead of floats, or floats of 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmserve.errors import ServeError, Unsupported

Requests = Sequence[Mapping[str, Any]]
"""Inputs of the model, by name."""
Shrink = Callable[[Path, Path, Requests], None]


def shrink(precision: str, file: Path, out: Path, requests: Requests) -> None:
    """Writes the file. `requests`: typical inputs, from which `int8-static` learns the ranges of values. Raises
    Unsupported if the tools refuse the model."""
    try:
        PRECISIONS[precision](file, out, requests)
    except (ModuleNotFoundError, ServeError):
        raise
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        raise Unsupported(f"{file.name} cannot be made {precision}: {text.splitlines()[0]}") from error


def _dynamic(file: Path, out: Path, requests: Requests) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(file, out, weight_type=QuantType.QInt8)


def _static(file: Path, out: Path, requests: Requests) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._remaining = iter(requests)

        def get_next(self) -> Any:
            return next(self._remaining, None)

    kinds = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8}
    quantize_static(file, out, Reader(), quant_format=QuantFormat.QDQ, **kinds)


def _halved(file: Path, out: Path, requests: Requests) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(file), keep_io_types=True), out)


PRECISIONS: Mapping[str, Shrink] = {"int8": _dynamic, "int8-static": _static, "fp16": _halved}
