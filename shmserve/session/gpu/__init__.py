"""Memory on GPUs as a client uses it, its own (`tensors`, by way of `cuda`) and what others have exported.

It lies below the session's memory and knows no requests. cupy is imported when the first array on a GPU is used.
"""
