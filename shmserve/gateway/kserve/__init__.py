"""The KServe protocol, as all doors speak it: requests become plans, replies become answers.

plans         a request as JSON -> a Plan of what the broker is asked
json_slices   large JSON in pieces, in turn with other work
json_tensors  tensors as JSON, and as typed contents of gRPC, both ways
generate      the generate extension
answers       replies of the broker -> the JSON and the buffers that are sent
status        errors of the server as status codes and texts
"""
