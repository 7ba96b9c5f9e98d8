"""llama.cpp through its C interface: the prompt once in sequence 0, copied to n sequences that share its cells."""

from __future__ import annotations

import ctypes

from peers.protocol import Engine, Job, Setup, serve

MAX_SEQUENCES = 64


def start(setup: Setup) -> tuple[Engine, dict[str, str]]:
    import llama_cpp as lib

    lib.llama_backend_init()
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    model = lib.llama_model_load_from_file(setup.weights.encode(), lib.llama_model_default_params())
    context_params = lib.llama_context_default_params()
    context_params.n_ctx = setup.max_model_len + MAX_SEQUENCES * 64
    context_params.n_batch = context_params.n_ubatch = 2048
    context_params.n_seq_max = MAX_SEQUENCES
    context_params.n_threads = context_params.n_threads_batch = setup.threads
    context_params.kv_unified = True  # or sequences could not share cells
    context = lib.llama_init_from_model(model, context_params)
    memory = lib.llama_get_memory(context)
    batch = lib.llama_batch_init(2048, 0, 1)

    def put(i: int, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.logits[i] = wants_logits

    def decode(count: int) -> None:
        batch.n_tokens = count
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def generate(job: Job) -> list[list[int]]:
        lib.llama_memory_clear(memory, True)
        prompt = job.prompt_token_ids
        for begin in range(0, len(prompt), 2048):
            chunk = prompt[begin : begin + 2048]
            for i, token in enumerate(chunk):
                put(i, token, begin + i, 0, begin + i == len(prompt) - 1)
            decode(len(chunk))
        for sequence in range(1, job.n):
            lib.llama_memory_seq_cp(memory, 0, sequence, 0, -1)
        new = [
            lib.llama_sampler_init_greedy() if job.greedy else lib.llama_sampler_init_dist(job.seed * 1000 + k)
            for k in range(job.n)
        ]
        last = (len(prompt) - 1) % 2048
        samples = [[lib.llama_sampler_sample(sampler, context, last)] for sampler in new]
        for step in range(job.max_tokens - 1):
            for k, ids in enumerate(samples):
                put(k, ids[-1], len(prompt) + step, k, True)
            decode(job.n)
            for k, ids in enumerate(samples):
                ids.append(lib.llama_sampler_sample(new[k], context, k))
        for sampler in new:
            lib.llama_sampler_free(sampler)
        return samples

    # The callback is kept alive for as long as the engine is.
    generate.quiet = quiet  # type: ignore[attr-defined]
    return generate, {"llama-cpp-python": lib.__version__}


if __name__ == "__main__":
    serve(start)
