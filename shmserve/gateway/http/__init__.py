"""HTTP/1.1.

start       how the door is put together
requests    complete requests: what the broker is asked, and the answer
connection  one connection
listener    what the connections of one listening socket share
bodies      chunked and compressed bodies
heads       the first lines of a request -> a Head
routes      methods and paths -> actions
openapi     the table of paths as an OpenAPI document
limits      what a client may send, and how long it may take
"""
