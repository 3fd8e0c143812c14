"""What stages leave behind, and the only thing they meet in.

Owns the bytes: where they lie, when they count, how they are checked. Knows nothing of models,
rewards or training, and imports the standard library, pyarrow and fsspec alone.

    <store>/<run>/
      run.json                                  resolved config and digests, written once
      tracking.json                             where the run is tracked, written once
      lease/000001.json                         who writes in the run; the highest token owns it
      prompts/<key>/                            the data set, rendered and tokenised
      iteration-000012/
        rollout/<key>/
          shard-00000.<sha256>.arrow            whole, or not there
          ledger.<sha256>.arrow                 who did what when, outside every digest
          manifest.json                         written last: nothing exists before it does
          retired.json                          where gc removed the shards: which, when, why
        score/<key>/ …
        update/<key>/ …
      evaluation-000012/                        policy 12 on held-out data; in no training key
        rollout/<key>/  score/<key>/            for each data source and way of sampling
        evaluation/<key>/                       what these come to, prompt by prompt
      policy/000012/<key>/                      weights and trainer state of a snapshot
      pins/<name>.json                          what others count on, and gc leaves

The invariant: a manifest names every byte of its output by digest, and nothing it names is
changed after it. Crash anywhere, run again: the output is found whole or made whole. Only ``gc``
removes bytes, and it leaves a tombstone in their place.
"""
