"""The OpenAI-compatible endpoints: models, completions, chats, transcriptions, embeddings, scores and tokens.

`requests` receives a request from the HTTP connection. `bodies` decodes its JSON, and `models` finds out from the
model's configuration which inputs and outputs the model has. `inputs` builds the tensors and the sampling parameters;
`templates` has the prompt of a chat rendered by a `renderer` if the model does not. `generation` makes one model
request per prompt, and `collection` one per text for `embeddings` and per pair for `scores`; `fan_out` sends them.
`generation` passes on the parts of the responses: `texts` reads these parts, `reading` separates the thinking from the
answer, and `formats` writes OpenAI's JSON. `responses` and `messages` turn their requests into chats, and `speech` into
completions. `images` takes the images out of chats, and `pooling` makes one vector of many. `tokens` has vLLM's
endpoints for tokens, and `errors` the JSON of errors.
"""
