"""The ports, and what answers there."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tests.testinfra.service.conftest import Service

CURL = "curl --silent --show-error --insecure --max-time 30 --output /dev/null"


def curl(host: Any, *arguments: str, show: str = "%{http_code}") -> str:
    """What curl on the host writes of the exchange."""
    answer: str = host.check_output(f"{CURL} --write-out {shlex.quote(show)} {shlex.join(arguments)}")
    return answer


def site_urls(service: Service) -> list[tuple[str, str]]:
    """An address and a URL for each site, a wildcard's host with a label put in."""
    address = service.addresses("https")[0]
    ip, _, port = address.rpartition(":")
    names = [site["hosts"][0].replace("*.", "any.").replace("*", "any.example.org") for site in service.config["sites"]]
    return [(f"{name}:{port}:{ip}", f"https://{name}:{port}/") for name in names]


def test_every_listener_is_the_services(host: Any, service: Service) -> None:
    listening = host.check_output("ss --no-header --listening --tcp --numeric --processes").splitlines()
    by_address: dict[str, list[str]] = {}
    for row in listening:
        by_address.setdefault(row.split()[3].replace("*", "[::]"), []).append(row)
    pids = {str(pid) for pid in service.pids.values()}
    told = [item["address"] for item in service.ask("status")["listeners"] if item["kind"] != "admin"]
    assert told
    for address in told:
        rows = by_address.get(address, [])
        assert rows, f"nothing listens on {address}: {sorted(by_address)}"
        assert all(any(f"pid={pid}," in row for pid in pids) for row in rows), rows


def test_https_answers_for_every_site(host: Any, service: Service) -> None:
    for resolve, url in site_urls(service):
        status, version = curl(host, "--resolve", resolve, url, show="%{http_code} %{http_version}").split()
        assert 200 <= int(status) < 500, url
        assert status != "421", url
        assert version in ("1.1", "2"), url


def test_certificate_covers_every_site(host: Any, service: Service) -> None:
    for resolve, url in site_urls(service):
        name, port, ip = resolve.split(":", 2)
        chain = f"openssl s_client -connect {ip}:{port} -servername {name} </dev/null 2>/dev/null"
        for question in (f"-checkhost {name}", "-checkend 0"):
            answer = host.run(f"{chain} | openssl x509 -noout {question}").stdout
            assert "does match certificate" in answer or "will not expire" in answer, (url, question, answer)


def test_old_tls_is_refused(host: Any, service: Service) -> None:
    resolve, url = site_urls(service)[0]
    ran = host.run(f"{CURL} --tlsv1.0 --tls-max 1.1 --ciphers DEFAULT@SECLEVEL=0 --resolve {resolve} {url}")
    assert ran.rc == 35, ran.stderr


def test_plain_http_is_sent_to_https(host: Any, service: Service) -> None:
    for address in service.addresses("redirect"):
        ip, _, port = address.rpartition(":")
        name = site_urls(service)[0][0].split(":")[0]
        status, target = curl(
            host, "--resolve", f"{name}:{port}:{ip}", f"http://{name}:{port}/a?b", show="%{http_code} %{redirect_url}"
        ).split()
        assert status == "308"
        assert target.startswith(f"https://{name}")
        assert target.endswith("/a?b")


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_is_green(host: Any, service: Service, path: str) -> None:
    for address in service.addresses("health"):
        assert curl(host, f"http://{address}{path}") == "200"
