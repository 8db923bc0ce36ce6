"""Models run by TensorRT, and how their plans are built."""
