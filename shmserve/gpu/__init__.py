"""The interface between the server, its clients and GPUs. Without tensors on a GPU nothing of it is imported.

`interface` says what a worker and a client need of a device. `choice` chooses the implementation. `runtime` loads CuPy,
the only library that is used, and holds the differences between CUDA and ROCm. The implementations on CuPy are
`workers.gpu.api` and `session.gpu.cuda`.
"""
