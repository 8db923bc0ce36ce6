"""Models run by PyTorch."""
