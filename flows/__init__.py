"""Orchestration: configuration, the Prefect flow, the command line, tracking. Nothing numeric.

Importing this package, or ``flows.config``, loads none of torch, vllm, ray, mlflow or prefect.
"""
