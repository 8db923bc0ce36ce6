"""GPUs while the server runs: metrics, the memory of processes, and health.

A thread (`monitor`) samples metrics (`samples`), waits for errors that the driver reports (`xids`), and decides with
`health` whether a GPU may be used. It reports changes to the core, which then stops or starts the GPU's instances.
"""
