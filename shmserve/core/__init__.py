"""All decisions of the server, without I/O or a clock: events in, effects out.

`core.Core` gives each event to the parts in these packages. They act on `state.State` and its `records`.
What is to be done is added to the effects of the turn, which the broker carries out.
"""
