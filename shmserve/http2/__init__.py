"""What the gateway's HTTP/2 server and the load generator's HTTP/2 client have in common: the frames."""
