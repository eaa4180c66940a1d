"""ppdeploy: one large model served across a few GPU machines with vLLM pipeline parallelism."""

__version__ = "0.1.0"
