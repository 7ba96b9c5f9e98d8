"""transformers `generate` with num_return_sequences, SDPA attention: the baseline that everybody has."""

from __future__ import annotations

from peers.protocol import Engine, Job, Setup, serve


def start(setup: Setup) -> tuple[Engine, dict[str, str]]:
    import torch
    import transformers

    torch.set_num_threads(setup.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(setup.weights, dtype=getattr(torch, setup.dtype))
    model.eval()

    def generate(job: Job) -> list[list[int]]:
        ids = torch.tensor([job.prompt_token_ids])
        torch.manual_seed(job.seed)
        sampling = {} if job.greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=not job.greedy,
                num_return_sequences=job.n,
                min_new_tokens=job.max_tokens,
                max_new_tokens=job.max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **sampling,
            )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens

    return generate, {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve(start)
