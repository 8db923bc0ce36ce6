"""Files that a configuration names: labels, warm-up data, initial states.

`safe_paths` opens them inside the model's directory, and `companions` checks that they exist and reads labels.
`python_file` imports Python files of users, `torch_file` recognises programs of PyTorch, and `elf` reads what a
shared library needs. `native_library` judges libraries of backends by it, and `native_interface` lists the functions
that they can call.
"""
