"""Questions about the server and its models, and their answers."""
