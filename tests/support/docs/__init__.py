"""The pages of docs/: their code blocks, the tests of these, and the tables generated from the source."""
