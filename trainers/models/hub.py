"""Models of the Hugging Face hub, and what a model folder must hold.

Invariant: without a network the answer comes within three seconds.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["HubUnavailable", "download", "missing_from"]

_REACH = 2.0
_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class HubUnavailable(Exception):
    """The hub cannot give the model; the text says why."""


def download(repo: str, say: Callable[[str], None]) -> Path:
    """The folder of `repo` in the hub's own cache, downloaded if it is not there whole.

    Args:
        repo: "owner/name".
        say: told before a download, which may take long.

    Raises:
        HubUnavailable: no network, no such model, no access, or the download broke off.
    """
    from huggingface_hub import constants, snapshot_download

    chosen: dict[str, Any] = {"allow_patterns": _FILES, "ignore_patterns": ["*/*", "consolidated*"]}
    try:
        folder = Path(snapshot_download(repo, local_files_only=True, **chosen))
        if missing_from(folder) is None:
            return folder
    except (OSError, ValueError):
        pass
    if constants.is_offline_mode():
        raise HubUnavailable("HF_HUB_OFFLINE is set and the hub's cache does not hold it")
    if (problem := _unreachable(repo)) is not None:
        raise HubUnavailable(problem)
    say(f"downloading {repo} from {constants.ENDPOINT}")
    try:
        return Path(snapshot_download(repo, **chosen))
    except Exception as error:  # noqa: BLE001  which errors there are depends on the HTTP library
        raise HubUnavailable(f"the download broke off: {_in_short(error)}") from error


def missing_from(folder: Path) -> str | None:
    """What keeps a folder from being a model for chats, with the remedy; None if nothing does."""
    if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
        return f"is that of a run; give its model, {folder / 'model'}"
    if not (folder / "config.json").is_file():
        return "has no config.json; give the folder that save_pretrained wrote"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(_table(index).get("weight_map", {}).values())
        if lacking := sorted(shard for shard in shards if not (folder / shard).is_file()):
            return f"lacks {lacking[0]}, which model.safetensors.index.json names; copy or download it again"
    elif not any(folder.glob("*.safetensors")):
        return "has no *.safetensors weights; save the model with save_pretrained"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return "has no tokenizer; save it there too with tokenizer.save_pretrained"
    settings = folder / "tokenizer_config.json"
    if not (_table(settings).get("chat_template") or (folder / "chat_template.jinja").is_file()):
        return ("has a tokenizer without a chat template; take the model's chat version, or put a template into its "
                "chat_template.jinja")
    return None


def _table(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, which the check or the loader then complains about."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _unreachable(repo: str) -> str | None:
    """Why the hub does not give `repo`, or None. In a thread, for looking up a host name knows no deadline."""
    from huggingface_hub import HfApi, constants

    answer: list[str | None] = [f"no answer from {constants.ENDPOINT} within {_REACH:g} s"]

    def ask() -> None:
        try:
            HfApi().model_info(repo, timeout=_REACH)
            answer[0] = None
        except Exception as error:  # noqa: BLE001  which errors there are depends on the HTTP library
            answer[0] = f"{constants.ENDPOINT}: {_in_short(error)}"

    thread = threading.Thread(target=ask, name="molt-gym-hub", daemon=True)
    thread.start()
    thread.join(_REACH + 0.5)
    return answer[0]


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
