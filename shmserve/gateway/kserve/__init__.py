"""The KServe protocol, as all doors speak it: what is asked becomes a plan or a question, what is answered a document.

plans      a request as JSON -> a Plan of what the broker is asked
slices     large JSON in pieces, in turn with other work
elements   tensors as JSON, and as typed contents of gRPC, both ways
generate   the generate extension
answers    replies of the broker -> the JSON and the buffers that are sent
documents  questions and operations: what is asked, and the document that is answered
asking     the broker is asked, for whoever came through any door
status     errors of the server as status codes and texts of the doors
"""
