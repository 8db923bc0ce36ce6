"""Sequences: requests that must run at the same instance, in order.

`scheduler` validates such a request and appends it to its sequence, creating the sequence on START. At dispatch it
binds waiting sequences to slots of instances (`slots`) and forms batches with at most one request per sequence. It
also ends sequences: on END, on failure, and after an idle timeout. The record `Sequence` is in `core.records`.
"""
