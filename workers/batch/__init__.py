"""Inputs and outputs of a batch.

`specs` describes the tensors of the model. `gather` turns the tensors of a batch's requests into the backend's input
arrays, one group for each set of requests that stack; `input_reader` checks a single request. A backend writes its
outputs to `results`, which has one row for each request; `scatter` turns output arrays into the tensors of these rows,
in shared memory or inside the message. The other modules implement features that only some models need: classification,
padding, ragged batches, sequences, and outputs in memory of the caller.
"""
