"""The web page at `/` of the HTTP endpoint.

`files` holds the files in `static`, which are all of the page's code, and the headers that confine it in the browser.
The page reads one event stream (`feed`): the gateway asks the broker once a second for all viewers together, and sends
each of them the rows that have changed (`rows`). For several servers, the page reads the stream of each. `requests`
handles the requests. For everything else the page uses the endpoints of the API, like any other client.
"""
