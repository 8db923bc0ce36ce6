"""The packages of a release, in environments without the source tree: `make test-package`.

`python -m tests.package` finds or installs the interpreters (pythons.py), builds the packages in build/packages as a
release does, and runs these tests. They need the environment build/release-env and a package index.
"""
