"""What runs on a machine with a GPU, without one: the script, the tests and the measures, with the stand-ins of
tests/standins or on the CPU. `make gpu-rehearsal`: a typing error would cost time on the device.
"""
