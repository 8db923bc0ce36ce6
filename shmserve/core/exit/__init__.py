"""The one way out: responses, and the end of requests."""
