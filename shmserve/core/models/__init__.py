"""Model versions and their worker processes: deployment, loading, crashes, scaling, sleep and memory."""
