"""Variables that libraries read when they are imported: set once, before any of them is."""

import os

_DEFAULTS = {
    # Spinning OpenMP threads on shared cores make everything 3 to 20 times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    # Nothing of a run is told to anyone. MLflow takes "true" only.
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A fresh Prefect database takes its migrations longer than the default of 20 s.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_LEVEL": "ERROR",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a worker without GPUs sees none,
}


def set_defaults() -> None:
    """Set what the user has not set."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
