"""Worker processes of a server: how they start, crash and hang, their cores, GPUs and limits."""
