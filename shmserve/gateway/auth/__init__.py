"""Who may do what at each endpoint.

access             roles of a caller
tokens             bearer tokens, and their file
restricted_apis    groups of actions behind a header
header_forwarding  headers that are passed on to models
tls                certificates
gate               all of this, as the options say, for each endpoint
"""
