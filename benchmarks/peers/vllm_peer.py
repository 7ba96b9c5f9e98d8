"""vLLM's CPU build, compiled, with prefix caching so that its n samples share the prompt's pages."""

from __future__ import annotations

from typing import Any

from peers.protocol import Engine, Job, Setup, serve


def start(setup: Setup) -> tuple[Engine, dict[str, str]]:
    import vllm

    arguments: dict[str, Any] = {
        "model": setup.weights,
        "skip_tokenizer_init": True,
        "dtype": setup.dtype,
        "max_model_len": setup.max_model_len,
        "max_num_seqs": 64,
        "disable_log_stats": True,
    }
    llm = vllm.LLM(**arguments)

    def generate(job: Job) -> list[list[int]]:
        params = vllm.SamplingParams(
            n=1 if job.greedy else job.n,
            temperature=0.0 if job.greedy else 1.0,
            max_tokens=job.max_tokens,
            ignore_eos=True,
            seed=None,  # a seed per request would take vLLM's slower sampling path
            detokenize=False,
        )
        (output,) = llm.generate([{"prompt_token_ids": job.prompt_token_ids}], params, use_tqdm=False)
        return [list(sample.token_ids) for sample in output.outputs]

    return generate, {"vllm": vllm.__version__}


if __name__ == "__main__":
    serve(start)
