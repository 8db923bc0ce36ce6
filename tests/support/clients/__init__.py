"""Clients and their sessions, and documents for the live views."""
