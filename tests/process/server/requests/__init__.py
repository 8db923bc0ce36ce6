"""Requests of clients to a whole server: transports, leases, the cache, and invalid ones."""
