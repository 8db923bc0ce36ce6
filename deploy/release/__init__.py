"""Packages of a release: `build` makes the sdist, the wheel and their checksums, byte for byte the same from the same
commit; `sbom` describes what an installation of the wheel consists of; `check` tells what a release still lacks.

docs/releases.md has the steps of a release.
"""
