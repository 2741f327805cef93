"""Integration with vLLM. It is imported only if vLLM loads it."""
