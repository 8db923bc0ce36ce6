"""Requests that models make to other models, and the deadlocks among instances that wait for each other."""
