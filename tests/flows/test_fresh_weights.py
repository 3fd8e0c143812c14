"""After a resume, and after the loss of its engine, a run samples with its newest policy."""

import pytest
import torch

import tiny
from artifacts.branches import open_store
from artifacts.manifests import Ref, read_manifest
from artifacts.runs import committed
from artifacts.shards import read_table
from stages.contract import Product, find_or_make
from stages.update.snapshot import Snapshot, read_snapshot, write_snapshot
from stages.update.trainers import policy_work
from tiny_run import session, train

BASE_TOKEN, TRAINED_TOKEN = 8, 12


def always(token):
    """A model whose every next token is ``token``: all hidden states are one and the same."""
    model = tiny.model(tied=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight[token] = 1.0
    return model


@pytest.fixture(scope="module")
def url(folder):
    """Three iterations of a policy that always says one token; then the kept one says another."""
    always(BASE_TOKEN).save_pretrained(folder / "stubborn")
    tiny.tokenizer().save_pretrained(folder / "stubborn")
    with session("run=fresh", "model=stubborn", "checkpoint.every=3") as made:
        train(made, until=3)
        store, work = made.store, policy_work(made.history[-1])
    old = read_snapshot(store, Ref(work.folder, read_manifest(store, work.folder).digest))
    weights = {n: p.detach().numpy() for n, p in always(TRAINED_TOKEN).named_parameters()}
    changed = Snapshot({**old.tensors, "weights": weights}, old.state)
    for name in store.names(work.folder):
        store.remove(f"{work.folder}/{name}")
    find_or_make(store, work, lambda: Product(write_snapshot(store, work.folder, changed)))
    return f"{folder}/runs/fresh"


def tokens_of(url, iteration):
    store = open_store(url)
    ((folder, manifest),) = committed(store, iteration, "rollout")
    table = read_table(store, folder, manifest)
    return {token for ids in table["response_ids"].to_pylist() for token in ids}, table


def test_resumed_run_samples_with_the_policy_it_resumes_from(url):
    for iteration in (1, 2, 3):
        assert tokens_of(url, iteration)[0] == {BASE_TOKEN}
    with session("run=fresh", "model=stubborn", "checkpoint.every=3") as made:
        made.recall_finished()
        made.rollout(4)
        tokens, table = tokens_of(url, 4)
        assert tokens == {TRAINED_TOKEN}
        assert set(table["policy_version"].to_pylist()) == {3}
        digest = made.history[-1].manifest.outcome["weights_digest"]
        assert set(table["policy_digest"].to_pylist()) == {digest}

        # The engine is lost, and with it what it held: the next one is given it again.
        made.pools.engines.drop()
        ((folder, _),) = committed(made.store, 4, "rollout")
        for name in made.store.names(folder):
            made.store.remove(f"{folder}/{name}")
        made.rollout(4)
        assert tokens_of(url, 4)[0] == {TRAINED_TOKEN}
