"""The GPU path compared with CUDA alone, in one run: `python -m bench.gpu --out FOLDER` (docs/development.md).

A measure is a function of `MEASURES` that takes a `GpuSetting` and returns rows. `parties` are the processes that take
turns: bare CUDA, bare PyTorch, and clients. `recorder` counts the copies of workers. What a machine lacks is a row with
the reason.
"""
