"""From files to batches of tokenised prompts: `readers`, `prompts` (text to token ids) and `loader` (order and state).

Nothing is imported here: reading a file's columns must not cost the import of torch.
"""
