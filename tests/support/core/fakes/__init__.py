"""Workers and clients for tests of the core, written from the docstrings of `shmserve.protocol.messages` alone.

They assert the core's obligations: a handle into memory that was never announced, a second reply to a request, or a
batch over the limit ends the test at once.
"""
