"""A committed policy as a Hugging Face folder."""

from typing import Any

from artifacts.manifests import Ref, read_manifest
from artifacts.store import Store
from stages.update.snapshot import read_tensors


def save_policy(store: Store, snapshot: Ref, base: str, to: str) -> None:
    """Write the weights of ``snapshot`` to folder ``to``, in the type and dress of ``base``.

    Raises:
        ValueError: the snapshot's tensors are not those of the base model.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    manifest = read_manifest(store, snapshot.path, snapshot.digest)
    tensors = read_tensors(store, snapshot.path, manifest, "weights")
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        names = sorted(parameters.keys() ^ tensors.keys())
        raise ValueError(f"{snapshot.path} and {base} differ in {len(names)} tensors: {names[:3]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(tensors[name]))
    model.save_pretrained(to)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(to)
