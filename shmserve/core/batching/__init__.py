"""Batches at workers: formed, sent, extended, recalled and reported; leases; and the slots of sequences."""
