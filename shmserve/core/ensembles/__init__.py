"""Requests that run as a graph of steps, each a request to another model."""
