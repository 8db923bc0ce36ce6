"""What a worker does on a GPU, below the backends: the libraries, memory there, building engines."""
