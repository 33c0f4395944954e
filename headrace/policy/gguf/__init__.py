"""GGUF in: a Hugging Face folder made from a quantised file of llama.cpp."""
