"""Language models: llama.cpp and vLLM, compared with bare engines."""
