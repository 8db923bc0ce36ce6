"""The HTTP door.

routes      methods and paths -> what is wanted
openapi     the table of paths as a document for programs
heads       the first lines of a request -> a Head
bodies      chunked and compressed bodies
limits      what a caller may send, and how long it may take
connection  one connection
requests    what a complete request makes happen
door        all connections of one listening socket
"""
