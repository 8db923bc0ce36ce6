"""The KServe protocol v2, shared by HTTP and gRPC.

`plans` turns a request into a plan: the request to the broker, and how to answer the client. Large JSON is processed in
slices, so that it does not hold up other clients: `json_scan` finds its brackets and strings, `json_outline` cuts out
the large lists, and `json_values` decodes these. `json_tensors` converts tensors from and to JSON, and from the typed
contents of gRPC. `generate` has the plans and responses of the generate extension. `answers` turns a reply of the
broker into the JSON and the buffers of the HTTP response. `status` maps errors to status codes and texts.
"""
