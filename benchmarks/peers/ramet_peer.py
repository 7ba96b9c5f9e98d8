"""Ramet through its front door, text included."""

from __future__ import annotations

from typing import Literal, cast

from peers.protocol import Engine, Job, Setup, serve


def start(setup: Setup) -> tuple[Engine, dict[str, str]]:
    import torch

    from ramet import LLM, SamplingParams, __version__

    dtype = cast(Literal["float32", "bfloat16"], setup.dtype)
    llm = LLM("smollm2-135m", dtype=dtype, num_threads=setup.threads)

    def generate(job: Job) -> list[list[int]]:
        params = SamplingParams(
            n=job.n,
            temperature=0.0 if job.greedy else 1.0,
            max_tokens=job.max_tokens,
            ignore_eos=True,
            seed=job.seed,
            detokenize=True,
        )
        (output,) = llm.generate([{"prompt_token_ids": job.prompt_token_ids}], params, use_tqdm=False)
        return [sample.token_ids for sample in output.outputs]

    return generate, {"ramet": __version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve(start)
