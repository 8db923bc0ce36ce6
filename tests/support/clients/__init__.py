"""Clients and their sessions, and documents that clients show."""
