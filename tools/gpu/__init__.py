"""The parts of `tools.gpu_suite`, each a program of its own that prints what it measured as JSON lines."""
