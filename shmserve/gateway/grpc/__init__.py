"""The services of gRPC: inference.proto and health.proto, which `make proto` turns into grpc.binpb.

start     the options, and how the door is made
methods   which path is which call
calls     calls with one answer
stream    ModelStreamInfer
services  what calls share
rpcs      the table of calls that are answered by documents
plans     what stands around the tensors of a request -> a Plan
contents  large typed contents, a slice at a time
wire      the bytes of a request taken apart, those of an answer put together
messages  the messages as protobuf has them
codes     errors of the server as status codes
"""
