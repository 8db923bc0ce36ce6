"""How clients connect on this machine: SEQPACKET and ZeroMQ sockets, roles, and turns between clients."""
