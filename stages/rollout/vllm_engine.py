"""The door to vLLM.

The engine runs inside its worker's process, so new weights reach it as arrays and no reload of
the model happens. It serves vLLM on CPU and GPU alike; what differs is said where it does.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from stages.arrays import tensor_of
from stages.rollout.config import RolloutConfig
from stages.rollout.engine import Request, Sampled

# Read by vLLM when it is imported.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc takes our own iterator
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmEngine:
    """See :class:`stages.rollout.engine.Engine`."""

    def __init__(self, model: str, config: RolloutConfig, context: int) -> None:
        import torch

        self._on_gpu = torch.cuda.is_available()
        os.environ.update(_ENVIRONMENT)
        import vllm

        if not self._on_gpu:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._config = config
        # Kernels follow from this number too: where they must not vary, it is the shard's own.
        shard = config.prompts_per_shard * config.samples_per_prompt
        self._in_flight = shard if config.deterministic else config.max_sequences
        self._llm = vllm.LLM(model, **self._options(context))

    def _options(self, context: int) -> dict[str, Any]:
        config = self._config
        options: dict[str, Any] = {
            "dtype": config.dtype,
            "max_model_len": context,
            "max_num_seqs": self._in_flight,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
            "seed": 0,  # every request carries its own
            "disable_log_stats": True,
        }
        if not self._on_gpu:
            # With chunked prefill the CPU engine dies of per-request seeds
            # ("CPU Generator does not use offset"); compiling costs 70 s and gains nothing.
            return options | {"enforce_eager": True, "enable_chunked_prefill": False}
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": graph_sizes(self._in_flight),
        }
        return options | {
            "gpu_memory_utilization": config.gpu_memory,
            "compilation_config": graphs,
        }

    def load(self, weights: Mapping[str, Any]) -> None:
        tensors = [(name, tensor_of(packed)) for name, packed in weights.items()]
        if self._on_gpu:
            self._llm.apply_model(lambda model: model.load_weights(iter(tensors)) and None)
        else:
            # On CPU each linear layer is packed after loading; this packs them again, but
            # leaves a tied head as it was, without a word.
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
            self._llm.apply_model(_pack_tied_head)
        self.forget()  # what is cached is of the old weights

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    def sample(
        self, requests: Sequence[Request], sampling: RolloutConfig | None = None
    ) -> Iterator[tuple[int, Sampled]]:
        engine, config = self._llm.llm_engine, sampling or self._config
        for index, request in enumerate(requests):
            prompt = {"prompt_token_ids": list(request.prompt_ids)}
            engine.add_request(str(index), prompt, self._params(request.seed, config))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    index, (sample,) = int(output.request_id), output.outputs
                    if self._text_comes_last(config):
                        sample.text = self._text(requests[index], sample, config)
                    yield index, _sampled(sample)

    def _text_comes_last(self, config: RolloutConfig) -> bool:
        # Token by token, text costs a GPU engine more than sampling does (46 against 25 thousand
        # tokens a second); only stop strings have to be looked for as it grows.
        return self._on_gpu and not config.stop

    def _text(self, request: Request, sample: Any, config: RolloutConfig) -> str:
        """The text that vLLM itself would have made on the way."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        asked: Any = SimpleNamespace(
            request_id="",
            prompt_token_ids=list(request.prompt_ids),
            prompt_embeds=None,
            sampling_params=self._params(request.seed, config),
        )
        text = IncrementalDetokenizer.from_new_request(self._llm.get_tokenizer(), asked)
        text.update(list(sample.token_ids), sample.finish_reason == "stop")
        return str(text.get_next_output_text(finished=True, delta=False))

    def _params(self, seed: int, config: RolloutConfig) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=1,
            seed=seed,
            max_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop=list(config.stop) or None,
            stop_token_ids=list(config.stop_token_ids) or None,
            detokenize=not self._text_comes_last(config),
            logprobs=0,  # the sampled token's own
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def graph_sizes(most: int) -> list[int]:
    """Numbers of samples in flight that CUDA graphs are captured for.

    They have to reach ``most``: beyond the largest, decoding is half as fast, and vLLM stops at
    512 by itself. Steps of an eighth keep them few, as each takes 40 ms of the engine's start.
    """
    sizes, size = [n for n in (1, 2, 4) if n < most], 8
    while size < most:
        sizes.append(size)
        size += max(8, size // 64 * 8)
    return [*sizes, most]


def _sampled(output: Any) -> Sampled:
    ids = list(output.token_ids)
    flat = output.logprobs
    starts = np.asarray(flat.start_indices, dtype=np.int64)
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)[starts]
    if len(logprobs) != len(ids):
        raise RuntimeError(f"the engine gave {len(ids)} tokens and {len(logprobs)} log-probs")
    return Sampled(ids, logprobs, str(output.finish_reason), output.text)


def _pack_tied_head(model: Any) -> None:
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
