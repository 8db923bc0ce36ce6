"""Model repositories on disk.

`store` scans the repositories for models and their versions, and `layout` adds findings about their files. `snapshot`
detects changes by comparing names, sizes and times. `generation` preserves the files of a loaded version for its
workers.
"""
