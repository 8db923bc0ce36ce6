"""Packages of a release: `build` builds the sdist, the wheel and their checksums, reproducibly for each commit; `sbom`
lists the packages of an installation of the wheel; `check` reports what a release still lacks.

docs/releases.md has the steps of a release.
"""
