"""What an iteration does. Each stage alone in its folder; they meet only in committed data.

At this level lies what stages share: the contract (find committed or make), the configuration
base, workers, and model code (loading, packed forward, log-probabilities).
"""
