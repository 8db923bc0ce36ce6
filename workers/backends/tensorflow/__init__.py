"""Models run by TensorFlow: SavedModels and frozen graphs.

`files` reads the declarations of a model file without running any of it: `SavedModel` chooses a graph by its tag and a
signature, `FrozenGraph` contains only a graph. It also says which nodes outputs depend on, and whether one of them
keeps a tensor after the run. `sessions` opens a session, with which `backend` runs batches. `engine` imports
TensorFlow.
"""
