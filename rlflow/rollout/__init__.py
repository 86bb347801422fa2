"""Sampling responses: what an engine must offer, and vLLM inside the job's own processes."""
