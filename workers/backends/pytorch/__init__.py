"""Models run by PyTorch.

`programs` opens a file as a program and maps the tensors of the configuration to its arguments and results. `backend`
runs batches with it. On a GPU, `gpu_batches` queues them, with CUDA graphs, and `device` has the calls that need a GPU.
`describe` finds the tensors of a file for `shmserve init`.
"""
