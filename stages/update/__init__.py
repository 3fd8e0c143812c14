"""Scored shards and a policy in, the next policy out."""
