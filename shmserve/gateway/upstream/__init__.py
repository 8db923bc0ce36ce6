"""The gateway as a client of the broker: the link, shared memory, and requests on behalf of callers."""
