"""What a reward's process sees of this one's environment: no credentials, no address of a store.

By name, since nothing else tells. A reward that talks to a service says which of these variables
it needs (``environment: [OPENAI_API_KEY]``).
"""

import fnmatch
import os
from collections.abc import Iterable, Mapping

CREDENTIALS = (
    "AWS_*",
    "AZURE_*",
    "BOTO_*",
    "CLOUDSDK_*",
    "FSSPEC_*",
    "GCLOUD_*",
    "GCP_*",
    "GCS_*",
    "GITHUB_*",
    "GOOGLE_*",
    "HF_TOKEN*",
    "KUBECONFIG",
    "MINIO_*",
    "MLFLOW_*",
    "NETRC",
    "PREFECT_*",
    "RAY_*",
    "S3_*",
    "SSH_*",
    "WANDB_*",
    "*ACCESS_KEY*",
    "*API_KEY*",
    "*APIKEY*",
    "*CONNECTION_STRING*",
    "*CREDENTIAL*",
    "*DATABASE_URL*",
    "*PASSPHRASE*",
    "*PASSWD*",
    "*PASSWORD*",
    "*PRIVATE_KEY*",
    "*SECRET*",
    "*TOKEN",
    "*_AUTH",
    "*_DSN",
    "*_KEY",
    "*_PAT",
)


def without_credentials(
    environment: Mapping[str, str] = os.environ, keep: Iterable[str] = ()
) -> dict[str, str]:
    """``environment`` without what looks like a credential, but for the names in ``keep``."""
    kept = set(keep)
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not looks_like_credential(name)
    }


def looks_like_credential(name: str) -> bool:
    """Whether a variable of this name is kept from rewards."""
    return any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in CREDENTIALS)
