"""`shmserve run`: one model in the foreground, without a server."""
