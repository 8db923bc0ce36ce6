"""GPU access of a worker, below the backends.

`api` wraps CUDA and TensorRT. `shared` opens GPU memory of other processes for inputs, allocates memory for outputs
that others read on the GPU, and copies between them. A worker whose instance is not on a GPU imports neither library.
"""
