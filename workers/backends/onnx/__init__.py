"""Models run by ONNX Runtime.

`options` turns the configuration into a plan, with execution providers from `providers`. `backend` opens a session with
that plan and runs batches: plainly, through a binding of inputs and outputs (`run`), or as CUDA graphs (`graphs`).
`facts` reads the tensors of a model file.
"""
