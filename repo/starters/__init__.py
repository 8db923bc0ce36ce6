"""Model directories for `shmserve init`: a configuration with explained settings, and a model that answers as written.

`starter` decides what a directory contains, from a model file or from one of the templates; `config_text` writes its
config.pbtxt. Invariant: a user's file is copied and its header may be read, but nothing in it is run here.
"""
