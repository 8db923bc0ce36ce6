"""The gRPC services of inference.proto and health.proto, as a server and its clients know them: `messages` has the
protobuf classes, `codes` the status codes. `make proto` compiles the services to grpc.binpb.
"""
