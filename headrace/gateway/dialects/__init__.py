"""The dialects that clients speak: OpenAI responses and chat completions, Anthropic messages."""
