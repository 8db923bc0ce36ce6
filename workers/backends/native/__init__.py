"""Hosts Triton's C and C++ backends, unmodified: `libtriton_NAME.so`.

`shim/` is the C side: it provides the functions of libtritonserver.so that backends call, and keeps requests and
responses as C objects. `compiler` compiles it, `build` finds or caches the result, and `library` loads it and a
backend. `records` describes requests, events and calls as words, `server_calls` does what backends want of the server,
`memory` gives them memory on a GPU, and `backend` runs batches.
"""
