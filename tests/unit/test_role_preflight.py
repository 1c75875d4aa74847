"""Preflight's verdicts, from facts of hosts that nobody has at hand."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles" / "preflight" / "files"
SITE = '[[sites]]\nhosts = ["example.org"]\nupstreams = ["http://127.0.0.1:3000"]\n'

GOOD: dict[str, Any] = {
    "configuration": SITE,
    "certificates": [],
    "nofile": 8192,
    "port_owners": ["reverse-proxy.service"],
    "engine": "",
    "required": {
        "python": "3.11",
        "python_program": "python3",
        "systemd": "247",
        "docker": "20.10",
        "podman": "4.3",
        "disk_mib": 400,
        "folder": "/opt/reverse-proxy",
        "process_mib": 64,
        "connection_kib": 64,
    },
    "facts": {
        "nr_open": 1048576,
        "file_max": 9223372036854775807,
        "manager": {"soft": 1024, "hard": 1048576, "may_raise": True},
        "unit": {"nofile_from": "", "nofile_says": ""},
        "container": "",
        "memory_mib": 2048,
        "disk_mib": 20000,
        "processors": 2,
        "ipv6": True,
        "listening": [],
        "python": {"version": "3.11.2", "tag": "cp311", "machine": "x86_64", "venv": True},
        "systemd": "252",
        "engines": {},
        "compose": "",
    },
}


def socket(address: str, port: int, unit: str = "nginx.service", name: str = "nginx") -> dict[str, Any]:
    return {"address": address, "port": port, "ipv6": ":" in address, "pid": "42", "name": name, "unit": unit}


def judged(changes: dict[str, Any] | None = None, **facts: Any) -> list[str]:
    """The refusals for GOOD with these changes, and with one wheelhouse on the controller."""
    question = copy.deepcopy(GOOD) | (changes or {})
    question["facts"] |= facts
    with tempfile.TemporaryDirectory() as wheelhouse:
        Path(wheelhouse, "x86_64-cp311").mkdir()
        question["required"]["wheelhouse"] = wheelhouse
        done = subprocess.run(
            [sys.executable, str(FILES / "judge.py"), str(ROOT / "proxy" / "budget.py")],
            input=json.dumps(question),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    refusals: list[str] = json.loads(done.stdout)["refusals"]
    return refusals


def test_a_good_host_is_not_refused() -> None:
    assert judged() == []


def test_the_incident_is_refused_with_the_arithmetic() -> None:
    (refusal,) = judged({"nofile": 1024, "configuration": "workers = 1\nmax_connections = 1024\n" + SITE})
    assert refusal == (
        "max_connections = 1024 needs 2185 descriptors in a worker, the limit is 1024 (soft) / 1024 (hard):"
        " set LimitNOFILE=3072, or max_connections to at most 443\n"
        "    worker 0 = 1024 client connections (share of 1024) + 1024 upstream connections (share of 1024)"
        " + 64 redirect connections (share of 64) + 1 connection being refused or handed over + 4 listening sockets"
        " + 2 logs + 2 event channel + 64 reserve = 2185"
    )


def test_auto_is_counted_with_the_hosts_processors() -> None:
    auto = {"configuration": 'workers = "auto"\nmax_connections = 4\n' + SITE}
    assert judged(auto, processors=4) == []
    (refusal,) = judged(auto, processors=8)
    assert "max_connections = 4 is below workers = 8" in refusal


def certificate_faults(certificates: object, folder: Path) -> list[str]:
    """What the role itself asks with, evaluated by Ansible."""
    role = FILES.parent
    given = folder / "given.json"
    given.write_text(json.dumps({"proxy_certificates": certificates, "preflight_engine": "", "role_path": str(role)}))
    play = folder / "play.yml"
    told = folder / "told.json"
    content = "{{ preflight_certificate_faults | to_json }}"
    task = {"ansible.builtin.copy": {"content": content, "dest": str(told), "mode": "0600"}}
    play.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": [task]}]))
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    extra = [f"--extra-vars=@{role / 'vars' / 'main.yml'}", f"--extra-vars=@{given}"]
    done = subprocess.run([program, *extra, str(play)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    faults: list[str] = json.loads(told.read_text())
    return faults


def test_what_is_missing_on_the_controller_is_told_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "there.pem").write_text("PEM")
    faults = certificate_faults(
        [
            {"dest": "tls/there.pem", "src": "files/there.pem"},
            {"dest": "tls/text.pem", "content": "PEM"},
            {"dest": "tls/fullchain.pem", "src": "files/fullchain.pem"},
            {"dest": "tls/privkey.pem", "content": "{{ vault_proxy_key }}"},
        ],
        tmp_path,
    )
    assert [fault.split()[0] for fault in faults] == ["tls/fullchain.pem", "tls/privkey.pem"]
    assert "files/fullchain.pem" in faults[0]
    assert "undefined variable" in faults[1]
    refusals = judged({"certificates": faults}, systemd="241")
    assert [refusal.split(",")[0].split(" has ")[0] for refusal in refusals] == [
        "the certificate or key tls/fullchain.pem",
        "the certificate or key tls/privkey.pem",
        "systemd 241",
    ]


def test_certificates_of_another_shape_are_told_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "there.pem").write_text("PEM")
    assert [
        fault.partition(":")[0]
        for fault in certificate_faults(
            [
                {"src": "there.pem"},
                {"dest": 5, "content": "PEM"},
                {"dest": "tls/a.pem"},
                {"dest": "../k.pem", "src": "there.pem"},
                {"dest": "/etc/k.pem", "content": "PEM"},
                {"dest": "tls/both.pem", "src": "there.pem", "content": "PEM"},
                {"dest": "tls/b.pem", "src": ["there.pem"]},
                {"dest": "tls/c.pem", "content": None},
                {"dest": "tls/d.pem", "src": "{{ nobody_defined_it }}"},
                "there.pem",
                {"dest": "tls/..good.pem", "src": "there.pem"},
            ],
            tmp_path,
        )
    ] == [
        "number 1 of proxy_certificates has no dest",
        "number 2 of proxy_certificates has no dest",
        "tls/a.pem has neither src nor content",
        "../k.pem has a dest that is no file below the folder of the configuration",
        "/etc/k.pem has a dest that is no file below the folder of the configuration",
        "tls/both.pem has both src and content",
        "tls/b.pem has a src that is no path",
        "tls/c.pem has a content that is no text",
        "tls/d.pem has a src that names an undefined variable",
        "number 10 of proxy_certificates is no dictionary",
    ]


@pytest.mark.parametrize("given", ["x", {"dest": "tls/a.pem"}, 5, None])
def test_certificates_that_are_no_list_are_told_so(given: object, tmp_path: Path) -> None:
    (fault,) = certificate_faults(given, tmp_path)
    assert fault.startswith("list proxy_certificates is none: write [{dest: ")


def test_every_reason_is_told_at_once() -> None:
    refusals = judged(
        {"nofile": 1024}, memory_mib=100, disk_mib=10, systemd="241", python={}, listening=[socket("0.0.0.0", 443)]
    )
    assert len(refusals) == 6


def test_every_bad_key_of_the_configuration_is_told_at_once() -> None:
    text = 'workers = true\nmax_connections = "10"\n[redirect]\nenabled = "no"\n'
    assert judged({"configuration": text}, systemd="241") == [
        'the configuration: workers: found true; wanted an integer from 1 to 256, or "auto"',
        (
            'the configuration: max_connections: found "10"; wanted an integer from 1 to 1000000, or "auto";'
            " write 10 without quotes"
        ),
        'the configuration: redirect.enabled: found "no"; wanted true or false; write true or false without quotes',
        (
            "the configuration has no site: set proxy_config, such as"
            " {sites: [{hosts: [git.example.org], upstreams: ['http://127.0.0.1:3000']}]}"
        ),
        "systemd 241, needed is 247 or newer as process 1: use another host, or the container image (role compose)",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('listeners = ["192.0.2.1:443"]\n', ['listeners[0]: found "192.0.2.1:443"; wanted a table']),
        (
            "listeners = [{address = 443}, {}]\n[redirect]\naddresses = [80]\n[health]\naddress = 9900\n",
            [
                "listeners[0].address: found 443; wanted a string (IP address and port); write the value in quotes",
                (
                    "listeners[1].address: found nothing; wanted a string (IP address and port);"
                    ' the key "address" is required'
                ),
                "redirect.addresses[0]: found 80; wanted a string (IP address and port); write the value in quotes",
                "health.address: found 9900; wanted a string (IP address and port); write the value in quotes",
            ],
        ),
        ("health = 5\n", ["health: found 5; wanted a table"]),
    ],
)
def test_addresses_of_another_shape_are_told_with_the_rest(text: str, said: list[str]) -> None:
    refusals = judged({"configuration": text + SITE}, systemd="241")
    assert refusals[:-1] == [f"the configuration: {reason}" for reason in said]
    assert refusals[-1].startswith("systemd 241")


def test_sites_of_another_shape_are_no_missing_site() -> None:
    assert judged({"configuration": 'sites = "x"'}) == [
        'the configuration: sites: found "x"; wanted an array of tables; write ["x"] with brackets'
    ]


def test_what_nobody_thought_of_is_a_refusal_beside_the_others() -> None:
    odd = {"nofile": 1024, "configuration": "workers = 1\nmax_connections = 1024\n" + SITE}
    refusals = judged(odd, listening=[{"port": 443}], systemd="241")
    assert [refusal.partition(":")[0] for refusal in refusals] == [
        "max_connections = 1024 needs 2185 descriptors in a worker, the limit is 1024 (soft) / 1024 (hard)",
        "a part could not be judged, KeyError",
        "systemd 241, needed is 247 or newer as process 1",
    ]


def test_a_configuration_that_nobody_thought_of_is_a_refusal_beside_the_others() -> None:
    nested = {"configuration": f"x = {'[' * 5000}{']' * 5000}\n{SITE}"}
    refusals = judged(nested, systemd="241")
    assert [refusal.partition(":")[0] for refusal in refusals] == [
        "the configuration could not be judged, RecursionError",
        "systemd 241, needed is 247 or newer as process 1",
    ]


@pytest.mark.parametrize("text", ["x =", "workers = -1\n" + SITE])
def test_a_bad_configuration_does_not_hide_what_the_host_lacks(text: str) -> None:
    refusals = judged({"configuration": text}, systemd="241", python={})
    assert [refusal.split(",")[0].split(":")[0] for refusal in refusals] == [
        "the configuration",
        "systemd 241",
        "no program python3 on this host",
    ]


CONTAINER = {"manager": {"soft": 1024, "hard": 1024, "may_raise": False}, "container": "lxc"}


@pytest.mark.parametrize(
    ("changes", "facts", "said"),
    [
        ({"configuration": ""}, {}, ["the configuration has no site: set proxy_config"]),
        ({"configuration": "x ="}, {}, ["the configuration: Invalid value"]),
        ({"configuration": "workers = -1\n" + SITE}, {}, ["the configuration: workers: found -1; wanted an integer"]),
        ({}, CONTAINER, ["needs 2185", "the service manager's own hard limit is 1024"]),
        (
            {},
            {
                "unit": {
                    "nofile_from": "/etc/systemd/system/reverse-proxy.service.d/99-x.conf",
                    "nofile_says": "1024:2048",
                }
            },
            ["the limit is 1024 (soft) / 2048 (hard)", "99-x.conf sets LimitNOFILE=1024:2048 after the rollout's"],
        ),
        ({}, {"container": "docker", "nr_open": 4096}, ["fs.nr_open is 4096, needed is 8192"]),
        ({}, {"memory_mib": 200}, ["200 MiB of memory, needed are 256: 3 processes of 64 MiB and 1024 connections"]),
        ({}, {"disk_mib": 399}, ["399 MiB are free for /opt/reverse-proxy, needed are 400"]),
        ({}, {"systemd": ""}, ["systemd is not running, needed is 247"]),
        ({}, {"systemd": "241"}, ["systemd 241, needed is 247"]),
        ({}, {"python": {}}, ["no program python3 on this host, needed is Python 3.11"]),
        (
            {},
            {"python": {"version": "3.9.2", "tag": "cp39", "machine": "x86_64"}},
            ["Python 3.9.2 on this host, needed is Python 3.11 or newer"],
        ),
        (
            {},
            {"python": {"version": "3.13.5", "tag": "cp313", "machine": "aarch64"}},
            ["it needs aarch64-cp313, there is x86_64-cp311 in /"],
        ),
        ({"engine": "auto"}, {}, ["found docker none, podman none; needed is docker 20.10 or podman 4.3"]),
        ({"engine": "docker"}, {"engines": {"docker": "19.3.1"}}, ["found docker 19.3.1; needed is docker 20.10"]),
    ],
)
def test_what_is_refused_says_found_needed_and_what_to_do(
    changes: dict[str, Any], facts: dict[str, Any], said: list[str]
) -> None:
    refusals = judged(changes, **facts)
    assert len(refusals) == len(said), refusals
    for refusal, part in zip(refusals, said, strict=True):
        assert part in refusal


def test_an_engine_is_asked_for_neither_python_nor_systemd() -> None:
    assert judged({"engine": "auto"}, engines={"podman": "4.3.1"}, python={}, systemd="") == []


@pytest.mark.parametrize(
    ("found", "listen"),
    [
        (socket("0.0.0.0", 443), "0.0.0.0:443"),
        (socket("192.0.2.1", 443), "0.0.0.0:443"),
        (socket("::", 80), "0.0.0.0:80"),
        (socket("127.0.0.1", 9900, "", ""), "127.0.0.1:9900"),
    ],
)
def test_a_port_that_is_taken_is_refused_with_its_owner(found: dict[str, Any], listen: str) -> None:
    refusals = judged(listening=[found])
    assert any(f"the configuration listens on {listen}: stop it" in refusal for refusal in refusals), refusals
    owner = "nginx (pid 42, nginx.service)" if found["name"] else "an unknown process (pid 42, no unit)"
    assert f"port {found['port']} is taken by {owner}" in refusals[0]


@pytest.mark.parametrize(
    "found",
    [
        socket("0.0.0.0", 443, "reverse-proxy.service", "reverse-proxy:"),
        socket("127.0.0.1", 8443),
        socket("127.0.0.2", 9900),
        socket("::1", 9900),
    ],
)
def test_what_is_ours_or_elsewhere_is_no_conflict(found: dict[str, Any]) -> None:
    assert judged(listening=[found]) == []


def test_facts_of_this_machine_are_judged() -> None:
    done = subprocess.run(
        [sys.executable, str(FILES / "facts.py"), "/opt/reverse-proxy", sys.executable, "reverse-proxy.service"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts.keys() == GOOD["facts"].keys()
    assert facts["processors"] >= 1
    assert facts["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert isinstance(judged(**facts), list)


def test_the_gatherer_speaks_the_python_of_an_old_host() -> None:
    """One that is too old for the proxy has to be told so, not to fail at a word that it does not know."""
    ast.parse((FILES / "facts.py").read_text(encoding="utf-8"), feature_version=(3, 8))
