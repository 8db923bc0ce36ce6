"""The image and the manifests of deploy/, run as a cluster would run them: a part of `make test-fleet`.

`programs` finds the required programs or installs them in build/fleet, `manifests` renders the manifests, `image`
builds the image, and `pod` runs it as a manifest specifies. of_schemas and of_kserve run in a separate environment.
"""
