"""The interface between the server, its clients and GPUs. It is imported only if there are tensors on a GPU.

`interface` has the protocols for workers and clients. `runtime` loads CuPy, the only library that is used, and contains
the differences between CUDA and ROCm. The implementations on CuPy are `workers.gpu.api`, opened by `open_device`, and
`session.gpu.cuda`, opened by `open_devices`.
"""
