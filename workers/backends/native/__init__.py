"""Hosts Triton's C and C++ backends, unmodified: `libtriton_NAME.so`.

`shim/` is the C side: it provides the functions of libtritonserver.so that backends call, and keeps requests and
responses as C objects. `build` finds or compiles it, `library` loads it and a backend, `records` describes requests and
events as words, and `backend` runs batches.
"""
