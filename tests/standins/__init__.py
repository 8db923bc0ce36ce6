"""Stand-ins for libraries that need a GPU: put in front of sys.path, they take the place of the real ones.

The rule: names, arguments and the order in which they may be called are those of the real library; what a stand-in
does with memory is real, so that a result is right only if the calls were.
"""
