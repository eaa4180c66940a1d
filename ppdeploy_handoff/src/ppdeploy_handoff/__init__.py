"""A better handoff between the stages of a vLLM pipeline: see README.md."""
