"""The pages of docs/: their code blocks, who tests them, and the tables made from the source."""
