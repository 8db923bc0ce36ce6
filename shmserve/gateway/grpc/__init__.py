"""The gRPC services of `shmserve.protocol.grpc`.

`start` has the options and builds the listener. `methods` maps the path of a call to its class and checks access:
`calls` has the unary calls and health, `stream` has ModelStreamInfer, and `services` holds what they share. For an
inference request, `wire` separates the tensors from the fields around them, and `plans` turns these fields into a plan;
`contents` converts typed contents, large ones in slices. `rpcs` is the table of calls whose response is a document.
"""
