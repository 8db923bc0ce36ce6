"""The image and the manifests of deploy/, run as a cluster would run them: a part of `make test-fleet`.

`programs` finds what is needed or puts it into build/fleet, `manifests` renders the manifests, `image` builds the
image, `pod` runs it as a manifest says. of_schemas and of_kserve run in an environment of their own.
"""
