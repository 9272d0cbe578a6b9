"""Reading checkpoint files: safetensors, shards, pickles."""
