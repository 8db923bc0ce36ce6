"""The KServe protocol v2, shared by HTTP and gRPC.

`plans` turns a request into a plan: the request to the broker, and how to answer the client. Large JSON is processed in
slices, so that it does not hold up other clients: `json_scan` finds its brackets and strings, `json_outline` cuts out
the large lists, and `json_values` decodes these; `json_strings` does so for long strings. `json_tensors` converts
tensors from and to JSON. `generate` has the plans and responses of the generate extension, `forms` reads forms with
files, and `json_schemas` tensors whose elements are JSON. `answers` turns a reply of the broker into the JSON and the
buffers of the HTTP response. `status` maps errors to status codes and texts.
"""
