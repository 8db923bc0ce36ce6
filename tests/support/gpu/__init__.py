"""Support for tests of GPU code."""
