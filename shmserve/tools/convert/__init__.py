"""Models made of other models, for `shmserve convert` and `shmserve quantize`: ONNX files of other frameworks' models,
and smaller ones of ONNX files.

`originals` finds the model to start from, `exports` and `smaller` write the new file, and `agreement` compares the
answers of both models while a server runs them.
"""
