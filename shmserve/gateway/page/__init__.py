"""The web page at `/` of the HTTP endpoint.

`files` holds the page's code, which is all in `static`, and the headers that confine it in the browser. The page reads
one event stream (`feed`): the gateway queries the broker once a second for all viewers together, and sends each viewer
the rows that have changed (`rows`). With several servers, the page reads the stream of each. `requests` handles the
requests. Otherwise the page uses the API's endpoints, like any client.
"""
