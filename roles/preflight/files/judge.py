"""Whether a rollout may go on, from what was found on a host: run on the controller, standard library only.

Usage: judge.py BUDGET < question.json, where BUDGET is the path of the proxy's own budget.py.
The question has `facts` (facts.py), `configuration` (the text of the TOML file), `nofile`, `port_owners`, `required`,
`engine` and `certificates` (what is wrong with their files on the controller). The answer has `refusals` (a sentence
each: found, needed, what to do), `budget` (that of budget.py) and `report` (lines for people). Exits with 0 if it could
judge, whatever the verdict.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DROP_IN = "10-rollout.conf"
"""The rollout's own; a drop-in that sorts after it has the last word."""
CONFIGURATION = "the configuration"
"""Its name in what is said of it: it is no file yet."""
DEFAULT_HTTPS = ("0.0.0.0:443", "[::]:443")
DEFAULT_REDIRECT = ("0.0.0.0:80", "[::]:80")
DEFAULT_HEALTH = "127.0.0.1:9900"
UNFORESEEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a value of a shape that nobody thought of ends in."""

Question = Mapping[str, Any]


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def service_limits(question: Question) -> str:
    """RLIMIT_NOFILE that the processes will get, as `SOFT:HARD`: what is asked for, as far as this host grants it."""
    facts, nofile = question["facts"], question["nofile"]
    soft, hard = nofile, nofile
    if overrides := later_drop_in(question):
        says = overrides.replace("infinity", "1048576").partition(":")
        soft, hard = int(says[0]), int(says[2] or says[0])
    bound = None if facts["manager"]["may_raise"] else facts["manager"]["hard"]
    if bound is not None:
        soft, hard = min(soft, bound), min(hard, bound)
    return f"{soft}:{hard}"


def later_drop_in(question: Question) -> str:
    """LimitNOFILE of a drop-in that comes after the rollout's; empty where there is none."""
    unit = question["facts"]["unit"] if not question["engine"] else {}
    after = os.path.basename(unit.get("nofile_from", "")) > DROP_IN
    return str(unit.get("nofile_says", "")) if after else ""


def ask_budget(program: str, question: Question) -> dict[str, Any]:
    """budget.py's answer. Raises ValueError with its complaint."""
    asked = {
        "configuration": question["configuration"],
        "file": CONFIGURATION,
        "limits": service_limits(question),
        "processors": question["facts"]["processors"],
        "ipv6": question["facts"]["ipv6"],
    }
    done = subprocess.run(
        [sys.executable, "-I", program], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    if not done.stdout:
        # The last line: of a traceback, too, it is the one that says what happened.
        raise ValueError((done.stderr.strip() or f"{program} ended with {done.returncode}").splitlines()[-1])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def wanted_addresses(settings: Mapping[str, Any]) -> list[str]:
    """Of settings that budget.py found no fault with: they have the shapes that are looked up here."""
    listeners = [one["address"] for one in settings.get("listeners", [])] or list(DEFAULT_HTTPS)
    redirect, health = settings.get("redirect", {}), settings.get("health", {})
    if redirect.get("enabled", True):
        listeners += redirect.get("addresses", DEFAULT_REDIRECT)
    if health.get("enabled", True):
        listeners.append(health.get("address", DEFAULT_HEALTH))
    return listeners


def overlap(host: str, found: Mapping[str, Any]) -> bool:
    """Whether binding ``host`` meets a socket in service. One on ``::`` may take IPv4 too, which nobody can see."""
    wanted, other = ipaddress.ip_address(host), ipaddress.ip_address(found["address"])
    if other.is_unspecified and other.version == 6:
        return True
    same_family = wanted.version == other.version
    return same_family and (wanted == other or wanted.is_unspecified or other.is_unspecified)


def ports_taken(question: Question, settings: Mapping[str, Any]) -> Iterator[str]:
    for address in wanted_addresses(settings):
        host, _, port = address.rpartition(":")
        try:
            host = str(ipaddress.ip_address(host.strip("[]")))
        except ValueError:
            continue  # `reverse-proxy check` says what is wrong with it, and where
        for found in question["facts"]["listening"]:
            ours = {found["unit"], found["name"]} & set(question["port_owners"])
            if str(found["port"]) == port and not ours and overlap(host, found):
                who = (
                    f"{found['name'] or 'an unknown process'} (pid {found['pid'] or '?'}, {found['unit'] or 'no unit'})"
                )
                yield (
                    f"port {port} is taken by {who}, and the configuration listens on {address}: stop it, or listen on"
                    " another address or port"
                )
                break


def software(question: Question) -> Iterator[str]:
    facts, required = question["facts"], question["required"]
    if engine := question["engine"]:
        yield from engines(facts, required, engine)
        return
    if not facts["systemd"] or version(facts["systemd"]) < version(required["systemd"]):
        yield (
            f"systemd {facts['systemd'] or 'is not running'}, needed is {required['systemd']} or newer as process 1:"
            " use another host, or the container image (role compose)"
        )
    python = facts["python"]
    if not python or version(python["version"].rstrip("+")) < version(required["python"]):
        found = f"Python {python['version']}" if python else f"no program {required['python_program']}"
        yield (
            f"{found} on this host, needed is Python {required['python']} or newer: install one and name it in"
            " proxy_python, or use the container image (role compose)"
        )
        return
    wanted = f"{python['machine']}-{python['tag']}"
    wheelhouses = sorted(path.name for path in Path(required["wheelhouse"]).glob("*-cp3*") if path.is_dir())
    if wanted not in wheelhouses:
        have = ", ".join(wheelhouses) or "none"
        yield (
            f"no wheelhouse fits this host: it needs {wanted}, there is {have} in {required['wheelhouse']}:"
            " run `make wheelhouse` for that architecture and Python, or set proxy_wheelhouse"
        )


def engines(facts: Mapping[str, Any], required: Mapping[str, Any], engine: str) -> Iterator[str]:
    names = ("docker", "podman") if engine == "auto" else (engine,)
    good = [name for name in names if version(facts["engines"].get(name) or "0") >= version(required[name])]
    if not good:
        found = ", ".join(f"{name} {facts['engines'].get(name) or 'none'}" for name in names)
        needed = " or ".join(f"{name} {required[name]}" for name in names)
        yield f"found {found}; needed is {needed} or newer: install one (apt-get install docker.io, or podman)"


def resources(question: Question, budget: Mapping[str, Any]) -> Iterator[str]:
    facts, required, nofile = question["facts"], question["required"], question["nofile"]
    processes = budget["workers"] + 2
    connections = budget["max_connections"]
    memory = processes * required["process_mib"] + connections * required["connection_kib"] // 1024
    if facts["memory_mib"] < memory:
        yield (
            f"{facts['memory_mib']} MiB of memory, needed are {memory}: {processes} processes of"
            f" {required['process_mib']} MiB and {connections} connections of {required['connection_kib']} KiB: give"
            " the host more, or lower workers or max_connections"
        )
    if facts["disk_mib"] < required["disk_mib"]:
        yield (
            f"{facts['disk_mib']} MiB are free for {required['folder']}, needed are {required['disk_mib']}: make room,"
            " or set proxy_install_dir"
        )
    if facts["container"] and facts["nr_open"] is not None and facts["nr_open"] < nofile:
        yield (
            f"fs.nr_open is {facts['nr_open']}, needed is {nofile}, and a container ({facts['container']}) cannot"
            f" change it: on its machine, sysctl fs.nr_open={nofile}"
        )


def limits(question: Question, budget: Mapping[str, Any]) -> Iterator[str]:
    """The budget's refusals, with the reason where the limit is not the one that was asked for."""
    for reason in budget["refusals"]:
        yield f"{reason}\n    {budget['arithmetic']}"
    granted = service_limits(question)
    if budget["refusals"] and granted != f"{question['nofile']}:{question['nofile']}":
        manager = question["facts"]["manager"]
        if says := later_drop_in(question):
            yield (
                f"the drop-in {question['facts']['unit']['nofile_from']} sets LimitNOFILE={says} after the rollout's"
                f" {DROP_IN}: remove it"
            )
        else:
            yield (
                f"LimitNOFILE={question['nofile']} cannot be had: the service manager's own hard limit is"
                f" {manager['hard']} and it may not raise it (a container without CAP_SYS_RESOURCE): raise the"
                " container's limit"
            )


def certificates(question: Question) -> Iterator[str]:
    """What is missing on the controller."""
    for fault in question["certificates"]:
        yield f"the certificate or key {fault}"


def sites(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings.get("sites", []) == []:
        yield (
            f"{CONFIGURATION} has no site: set proxy_config, such as"
            " {sites: [{hosts: [git.example.org], upstreams: ['http://127.0.0.1:3000']}]}"
        )


def safely(part: Iterator[str]) -> Iterator[str]:
    """Its refusals. What nobody thought of is one more of them, beside those of the other parts."""
    try:
        yield from part
    except UNFORESEEN as error:
        yield f"a part could not be judged, {unforeseen(error)}: correct what this is about; nothing was changed"


def unforeseen(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def judge(program: str, question: Question) -> dict[str, Any]:
    try:
        settings = tomllib.loads(question["configuration"])
        budget = ask_budget(program, question)
        refusals, counted = [*budget["faults"], *safely(sites(settings))], not budget["faults"]
    except ValueError as error:
        refusals, counted = [f"{CONFIGURATION}: {error}"], False
    except UNFORESEEN as error:
        refusals, counted = [f"{CONFIGURATION} could not be judged, {unforeseen(error)}"], False
    refusals += safely(certificates(question))
    if not counted:
        # What needs no configuration is judged all the same.
        return {"refusals": [*refusals, *safely(software(question))], "budget": None, "report": []}
    parts = (limits(question, budget), resources(question, budget), ports_taken(question, settings), software(question))
    refusals += [refusal for part in parts for refusal in safely(part)]
    return {"refusals": refusals, "budget": budget, "report": budget["text"].splitlines()}


if __name__ == "__main__":
    print(json.dumps(judge(sys.argv[1], json.load(sys.stdin))))
