"""What a model sends on its own: calls to other models, responses at any time, and its counters.

`calls` sends a model's calls and queries to the broker on the worker's link; `pending` is one such call with its
replies, and `queries` has the questions about models. `answer` has the requests and responses of models that run
requests one by one. `responses` lets a model answer requests from any thread and as often as it likes, and holds the
lock (the turn) that all threads of the worker share; `stream` is one such request. `coroutines` runs the event loop of
models with async methods, and `probes` asks a model whether it is ready.
"""
