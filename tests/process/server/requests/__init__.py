"""Client requests to a complete server: transports, leases, the cache, and invalid requests."""
