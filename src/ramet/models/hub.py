"""Models of the Hugging Face hub, through ``huggingface_hub`` (HF_HOME, HF_TOKEN and HF_HUB_OFFLINE count)."""

from __future__ import annotations

from pathlib import Path

from ramet.errors import ModelError

SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
WEIGHT_FILES = ["*.safetensors"]


def download(name: str, revision: str | None, *, weights: bool = True) -> Path:
    """Return the folder of a hub model's snapshot, from the cache or downloaded.

    Raises
    ------
    ModelError
        If the model does not exist, is gated, or is not in the cache and the hub cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import errors

    wanted = f"{name!r}" + (f" at revision {revision!r}" if revision else "")
    patterns = SMALL_FILES + (WEIGHT_FILES if weights else [])
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:
        raise ModelError(f"model {wanted} is gated: accept its terms on the hub and set HF_TOKEN.") from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"model {name!r} has no revision {revision!r}.") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(f"model {wanted} is not on the hub, or private: check the name, or set HF_TOKEN.") from None
    except errors.LocalEntryNotFoundError:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        cache = huggingface_hub.constants.HF_HUB_CACHE
        raise ModelError(f"model {wanted} is not in the cache ({cache}), and {why}.") from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {wanted} cannot be downloaded: {line}") from None
