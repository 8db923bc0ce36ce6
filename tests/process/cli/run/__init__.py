"""`shmserve run`: from a shell, and in a terminal."""
