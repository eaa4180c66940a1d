"""What runs on the nodes for a measurement alone, by the interpreter of their vLLM: each file is copied as it is."""
