"""Inputs and outputs of a batch.

`specs` describes the tensors of the model. `gather` turns the tensors of a batch's requests into the backend's input
arrays, one group for each set of requests that stack. A backend writes its outputs to `results`, which turns them into
the tensors of a row for each request, in shared memory or inside the message; `scatter` has what all batches share. The
other modules implement features that only some models need: classification, comparison, padding and sequences.
"""
