"""GPU memory on the client side: the client's own arrays (`tensors`), by means of `cuda`.

The session's `memory` imports this package when the first GPU array is used; nothing here depends on requests.
"""
