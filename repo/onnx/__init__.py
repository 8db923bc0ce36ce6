"""Reading and writing of ONNX files without onnxruntime or the package `onnx`.

`header` reads the declared inputs and outputs of untrusted files, `differences` compares them with a configuration, and
`protobuf` edits the networks of the samples.
"""
