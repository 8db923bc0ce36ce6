"""Calls: requests that models make to other models.

A worker that calls becomes a client of the core (`CallingWorker`), and `calls` admits its calls as ordinary requests.
While an instance waits for a response, its execution limit is paused and its resources are lent to others. `deadlock`
finds cycles of instances that wait for each other, so that one call of the cycle can be failed.
"""
