"""packtrain: sequence packing for (multimodal) LLM training, measured, planned once, proven."""
