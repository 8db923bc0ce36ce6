"""What clients may use: shares of requests and memory, bytes of bodies, turns of the event loop."""
