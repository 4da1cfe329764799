"""What `molt-gym envs` shows: the envs that are there, and the suites of others that are or could be."""

from dataclasses import asdict, dataclass
from typing import Any

from .adapters.suites import SUITES, Suite
from .registry import EnvInfo, list_envs, load_plugins

__all__ = ["Listing", "as_json", "as_markdown", "as_text", "listing"]


@dataclass(frozen=True)
class Listing:
    """envs: sorted by id. suites: whose envs are not among them. problems: what could not be loaded."""

    envs: list[EnvInfo]
    suites: list[Suite]
    broken_plugins: dict[str, str]
    problems: list[str]


def listing(suite: str | None = None) -> Listing:
    """All envs but those of suites, or those of one suite."""
    broken = {name: error for name, error in load_plugins().items() if error}
    envs = [env for env in list_envs(suite) if suite or env.source not in SUITES]
    problems = [f"plug-in {name} could not be loaded: {error}" for name, error in broken.items()]
    if suite and not envs:
        found = SUITES[suite]
        problems.append(f"{found.package} is not installed: {found.install}" if not found.installed
                        else f"{found.package} could not be imported")
    return Listing(envs, [] if suite else list(SUITES.values()), broken, problems)


def as_text(found: Listing) -> str:
    """A line for each env, then one for each suite."""
    names = [env.id for env in found.envs] + [_pattern(suite) for suite in found.suites]
    width = max(map(len, names), default=0)
    lines = [f"{env.id:<{width}}  {env.summary}  ({env.source})" + f" needs {', '.join(env.needs)}" * bool(env.needs)
             for env in found.envs]
    for suite in found.suites:
        how = f"`molt-gym envs {suite.namespace}` lists them" if suite.installed else f"not installed: {suite.install}"
        lines.append(f"{_pattern(suite):<{width}}  {suite.about}  ({how})")
    return "\n".join(lines)


def as_json(found: Listing) -> dict[str, Any]:
    """The same for programs."""
    suites = [asdict(suite) | {"installed": suite.installed, "install": suite.install} for suite in found.suites]
    return {"envs": [asdict(env) for env in found.envs], "suites": suites, "broken_plugins": found.broken_plugins}


def as_markdown(found: Listing) -> str:
    """The same as tables, for docs/envs.md."""
    lines = ["| id | what it is | from |", "|---|---|---|"]
    lines += [f"| `{env.id}` | {env.summary} | {env.source} |" for env in found.envs]
    lines += ["", "| suite | what it is | install |", "|---|---|---|"]
    lines += [f"| `{_pattern(suite)}` | {suite.about} | `{suite.install}` |" for suite in found.suites]
    return "\n".join(lines)


def _pattern(suite: Suite) -> str:
    return f"{suite.namespace}/…-v0"
