"""What a model costs, for `shmserve describe`: `network` counts the work of an ONNX file, `machine` measures how much
of it a core of this machine can do, and their quotient is the roofline: the speed that the model cannot exceed.
"""
