"""Model repositories that are not directories: S3, Google Cloud Storage, Azure, HTTP and Hugging Face.

A process of the server (`main`) mirrors them: `stores` list the objects of a model and read ranges of them, `download`
fetches objects into files, resumes and verifies, and `cache` keeps the files by content. `mirror` decides what to fetch
and publishes a model as a directory of hard links into the cache, replaced as a whole; for the rest of the server that
is a model of an ordinary repository. `address` and `credentials` parse the addresses and find the secrets for them,
which no text may contain. Only `stores` imports the clients, which extras install.
"""
