"""Parsing of model configurations into immutable structs, with the position of each error.

A config.pbtxt is parsed by `outline` and `lint` for positions and errors and by protobuf (`protos`) for values; the
JSON of a load call by `override`. Both give the structs of `schema`. `complete` fills in defaults, `origins` tells
where each value comes from, and `support` lists which fields are supported. Errors are collected in a
`problems.Report`.
"""
