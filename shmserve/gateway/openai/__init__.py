"""The OpenAI-compatible endpoints: models, completions, chat completions and embeddings.

`requests` receives a request from the HTTP connection. `bodies` decodes its JSON, and `models` reads in the model's
configuration what the model takes and returns. `inputs` makes the tensors and the parameters of sampling; the prompt of
a chat is rendered by `templates` if the model does not do it. `generation` makes a request to the model of each prompt,
and `embeddings` of each text; `fan_out` sends them. `generation` passes on the parts of the responses: `texts` reads
these parts, and `formats` writes the JSON of OpenAI, with the help of `logprobs` and `tool_calls`. `errors` has the
JSON of an error.
"""
