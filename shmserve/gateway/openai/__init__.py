"""The OpenAI-compatible endpoints: models, completions, chats, embeddings, scores and tokens.

`requests` receives a request from the HTTP connection. `bodies` decodes its JSON, and `models` finds out from the
model's configuration which inputs and outputs the model has. `inputs` builds the tensors and the sampling parameters;
`templates` has the prompt of a chat rendered by a `renderer` if the model does not. `generation` makes one model
request per prompt, and `collection` one per text for `embeddings` and per pair for `scores`; `fan_out` sends them.
`generation` passes on the parts of the responses: `texts` reads these parts, and `formats` writes OpenAI's JSON.
`tokens` has vLLM's endpoints for tokens, and `errors` the JSON of errors.
"""
