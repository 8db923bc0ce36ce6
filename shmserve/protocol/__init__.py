"""The messages between clients, broker and workers, their encoding, and the roles that allow them."""
