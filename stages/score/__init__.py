"""Rollout shards in, rewards and reference log-probabilities out."""
