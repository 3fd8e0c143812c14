"""Policy and prompts in, rollout shards out."""
