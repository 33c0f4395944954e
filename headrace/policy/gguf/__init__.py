"""GGUF import: makes a Hugging Face folder from a quantised file of llama.cpp."""
