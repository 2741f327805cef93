"""vLLM: who was in which step. Nothing of it is imported unless vLLM loads it."""
