"""GPU access of a worker, below the backends.

`api` is the device on CuPy, behind the interface of `shmserve.gpu`, and TensorRT. `shared` opens GPU memory of other
processes for inputs, allocates memory for outputs that others read on the GPU, and copies between them. A worker
without tensors on a GPU imports none of it.
"""
