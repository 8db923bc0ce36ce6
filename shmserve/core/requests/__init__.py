"""The life of a request, from admission to completion.

`connections` handles how clients connect, misbehave and disconnect. `admission` receives their requests and checks
roles, `quotas` and the request itself (`validation`). `enqueue` answers a request from the response `cache` or adds it
to the queue of its version, sequence or ensemble. When a worker has finished the request, `completion` sends the
response and releases its memory; `responses` handles requests with several responses. `queries` queues queries about
the server, and `trace` records single requests.
"""
