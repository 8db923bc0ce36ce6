"""Models run by TensorRT, and the command that builds their plans.

`backend` opens the plan (`engine`), creates an execution context for each of the instance's profiles (`profile`) and
runs batches, as CUDA graphs if configured. `build` is the process of `shmserve build`, with the shapes of the plan in
`build_shapes`.
"""
