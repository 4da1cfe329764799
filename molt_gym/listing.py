"""What `molt-gym envs` shows: the envs that are there, and the suites of others that are or could be."""

from dataclasses import asdict, dataclass
from importlib.metadata import packages_distributions, version
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
                        else f"{found.package or suite} could not be imported")
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
    """The same as tables, for docs/envs.md. Imports the suites, to count their ids, which may take some seconds."""
    lines = ["| id | what it is | from |", "|---|---|---|"]
    lines += [f"| `{env.id}` | {env.summary}{_needs(env)} | {env.source} |" for env in found.envs]
    if found.suites:
        lines += ["", "| suite | what it is | ids | to install | here |", "|---|---|---:|---|---|"]
    for suite in found.suites:
        ids = list_envs(suite.namespace)
        about = suite.about + (_needs(ids[0]) if len(ids) == 1 else "")
        name = f"`{ids[0].id}`" if len(ids) == 1 else f"`{_pattern(suite)}`"
        lines.append(f"| {name} | {about} | {len(ids) or ''} | {f'`{suite.install}`' if suite.extra else 'nothing'} "
                     f"| {_status(suite, bool(ids))} |")
    return "\n".join(lines)


def _needs(env: EnvInfo) -> str:
    return f" (needs {', '.join(f'`{name}`' for name in env.needs)})" if env.needs else ""


def _status(suite: Suite, has_ids: bool) -> str:
    if not suite.installed:
        return "not installed"
    if not has_ids:
        return "cannot be imported"
    if not suite.package:
        return "comes with molt-gym"
    packages = packages_distributions().get(suite.package, [suite.package])
    return f"{packages[0]} {version(packages[0])}"


def _pattern(suite: Suite) -> str:
    return f"{suite.namespace}/…-v0"
