"""What stands before the doors.

access    who may do what
tokens    bearer tokens, and their file
restrict  groups of what can be wanted, behind a header
headers   headers that go on to models
tls       certificates
doors     all of this, as the flags say, for each door
"""
