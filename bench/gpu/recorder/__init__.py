"""At the front of PYTHONPATH, this folder makes worker processes count their copies."""
