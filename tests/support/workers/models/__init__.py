"""Models for workers: by backend, and by what their tests need."""
