"""What an ONNX file declares, read without onnxruntime."""
