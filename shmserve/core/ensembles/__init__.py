"""Requests that run as a graph of steps, each of which is a request to another model."""
