"""The web page at `/` of the HTTP endpoint.

`requests` handles the requests. It has the page's code, which is all in `static`, and the headers that confine it in
the browser. The page reads one event stream (`feed`): the gateway queries the broker once a second for all viewers
together, and sends each viewer the rows that have changed. `recorder` keeps an hour of what the page shows, and
`timeline` what has happened. With several servers, the page reads the stream of each. Otherwise the page uses the API's
endpoints, like any client.
"""
