"""The services of gRPC: inference.proto and health.proto, which `make proto` turns into grpc.binpb.

start     the options, and how the door is made
codes     errors of the server as status codes
messages  the messages as protobuf has them
wire      the bytes of a request taken apart, those of an answer put together
contents  large typed contents, a slice at a time
plans     what stands around the tensors of a request -> a Plan
rpcs      the table of calls that are answered by documents
calls     calls with one answer
stream    ModelStreamInfer
services  which path is which call
"""
