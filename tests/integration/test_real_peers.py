"""Real programs through the proxy: git, curl, a WebSocket client and a browser, with certificates verified."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, wait_until
from tests.harness.programs import Demo, chromium, demo_upstream, git_http_backend
from tests.harness.websocket import WebSocket

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

REPOSITORY_BYTES = 52 * 1024 * 1024
UPLOAD_BYTES = 5 * 1024 * 1024


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    with demo_upstream(tmp_path / "demo.log") as demo:
        yield demo


@pytest.fixture
def front(demo: Demo, appliance: StartAppliance) -> Appliance:
    """An appliance before the demo's upstream."""
    return appliance({"sites": [{"hosts": ["localhost"], "upstreams": [demo.url]}]})


def trusted(front: Appliance) -> str:
    """A file with the appliance's self-signed certificate, for a client to trust."""
    path = front.folder / "trusted.pem"
    path.write_text(ssl.get_server_certificate(("127.0.0.1", front.port)))
    return str(path)


def environment(home: Path) -> dict[str, str]:
    """Nothing of the user's own settings, no proxy of the machine's."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "*", "LC_ALL": "C.UTF-8"}


# -- git


def git(folder: Path, *arguments: str) -> str:
    settings = {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "A",
        "GIT_COMMITTER_EMAIL": "a@example.org",
    }
    done = subprocess.run(
        ["git", "-c", "core.compression=0", "-c", "init.defaultBranch=main", *arguments],
        cwd=folder,
        env=environment(folder) | settings,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"git {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
def test_git_push_and_clone_of_a_large_repository(tmp_path: Path, appliance: StartAppliance, version: str) -> None:
    root, logs, work = tmp_path / "root", tmp_path / "logs", tmp_path / "work"
    for folder in (root, logs, work):
        folder.mkdir()
    git(root, "init", "--quiet", "--bare", "large.git")
    git(root / "large.git", "config", "http.receivepack", "true")
    git(work, "init", "--quiet")
    (work / "large.bin").write_bytes(os.urandom(REPOSITORY_BYTES))  # incompressible: the pack is as large
    git(work, "add", ".")
    git(work, "commit", "--quiet", "--message", "Large")
    head = git(work, "rev-parse", "HEAD")

    with git_http_backend(root, logs) as url:
        front = appliance({"sites": [{"hosts": ["localhost"], "upstreams": [url]}]})
        remote = f"https://localhost:{front.port}/large.git"
        options = ("-c", f"http.sslCAInfo={trusted(front)}", "-c", f"http.version={version}")
        git(work, *options, "push", "--quiet", remote, "HEAD:main")
        assert git(root / "large.git", "rev-parse", "main") == head
        git(tmp_path, *options, "clone", "--quiet", remote, "clone")
        wait_until(lambda: len(front.access_lines()) >= 5, "the exchanges are logged")
    assert git(tmp_path / "clone", "rev-parse", "HEAD") == head
    assert (tmp_path / "clone" / "large.bin").read_bytes() == (work / "large.bin").read_bytes()
    lines = "\n".join(front.access_lines())
    logged, other = ("HTTP/2.0", "HTTP/1.1") if version == "HTTP/2" else ("HTTP/1.1", "HTTP/2.0")
    assert f'"POST /large.git/git-receive-pack {logged}" 200' in lines
    assert f'"POST /large.git/git-upload-pack {logged}" 200' in lines
    assert other not in lines
    shutil.rmtree(tmp_path / "clone")  # pytest keeps folders of the last runs
    shutil.rmtree(work)
    shutil.rmtree(root)


# -- curl


def run_curl(front: Appliance, *arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--cacert", trusted(front), "--max-time", "60", *arguments],
        env=environment(front.folder),
        input=stdin,
        capture_output=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done


def curl(
    front: Appliance, target: str, *options: str, stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    return run_curl(front, *options, f"https://localhost:{front.port}{target}", stdin=stdin)


def echoed(answer: bytes) -> tuple[str, bytes]:
    """What the demo's /echo says it received: the head, and the body."""
    head, _, body = answer.partition(b"\n\n")
    return head.decode(), body


@pytest.mark.parametrize(("option", "version"), [("--http1.0", "1.0"), ("--http1.1", "1.1")])
def test_curl_downloads(front: Appliance, option: str, version: str) -> None:
    done = curl(front, "/bytes/1000003", option, "--write-out", "%{stderr}%{http_version} %{ssl_verify_result}")
    assert len(done.stdout) == 1_000_003
    assert done.stderr == b"1.1 0", "the answer is the server's own version, RFC 9110 section 2.5"
    wait_until(front.access_lines, "the request is logged")
    assert f'"GET /bytes/1000003 HTTP/{version}" 200 1000003' in front.access_lines()[0]


def test_curl_http_1_0_gets_a_body_of_unknown_length(front: Appliance) -> None:
    head, body = echoed(curl(front, "/echo", "--http1.0", "--data-binary", "@-", stdin=b"hello").stdout)
    assert head.startswith("POST /echo\n")
    assert body == b"hello"


def test_curl_keeps_one_connection(front: Appliance) -> None:
    again = f"https://localhost:{front.port}/bytes/10"
    done = curl(front, "/bytes/10", "--write-out", "%{stderr}%{num_connects} ", again)
    assert len(done.stdout) == 20
    assert done.stderr == b"1 0 "


@pytest.mark.parametrize("expect", ["Expect:", "Expect: 100-continue"])
def test_curl_uploads_chunked(front: Appliance, expect: str) -> None:
    sent = os.urandom(UPLOAD_BYTES)
    options = ("--verbose", "--upload-file", "-", "--header", "Transfer-Encoding: chunked", "--header", expect)
    done = curl(front, "/echo/upload", "--http1.1", *options, stdin=sent)
    head, body = echoed(done.stdout)
    assert body == sent
    assert re.search(r"^transfer-encoding: chunked$", head, re.IGNORECASE | re.MULTILINE)
    assert (b"< HTTP/1.1 100 " in done.stderr) == (expect == "Expect: 100-continue")


def test_curl_uploads_with_a_length_and_expects_100_continue(front: Appliance, tmp_path: Path) -> None:
    file = tmp_path / "sent"
    file.write_bytes(os.urandom(UPLOAD_BYTES))
    expecting = ("--upload-file", str(file), "--header", "Expect: 100-continue")
    done = curl(front, "/echo", "--http1.1", "--verbose", *expecting)
    head, body = echoed(done.stdout)
    assert body == file.read_bytes()
    assert f"content-length: {UPLOAD_BYTES}" in head.lower()
    assert b"< HTTP/1.1 100 " in done.stderr


def test_curl_head(front: Appliance) -> None:
    done = curl(front, "/bytes/12345", "--head")
    assert b"\r\ncontent-length: 12345\r\n" in done.stdout.lower()
    assert done.stdout.endswith(b"\r\n\r\n")


def test_curl_follows_the_redirect(front: Appliance) -> None:
    url = f"http://localhost:{front.redirect_port}/bytes/7?x=y"
    done = run_curl(front, "--location", "--write-out", "%{stderr}%{num_redirects} %{url_effective}", url)
    assert done.stderr.decode() == f"1 https://localhost:{front.port}/bytes/7?x=y"
    assert len(done.stdout) == 7


# -- WebSocket and browser


def test_websocket_echo(front: Appliance) -> None:
    context = ssl.create_default_context(cafile=trusted(front))
    raw = socket.create_connection(("127.0.0.1", front.port))
    with WebSocket(raw, context) as client:
        for message in ("h\xe9llo", b"\x00\xff", b"x" * 3_000_000):
            client.send(message)
            assert client.recv() == message
        client.ping()
    assert client.close_code == 1000, "the upstream's closing handshake came through"
    wait_until(front.access_lines, "the tunnel is logged")
    assert '"GET /ws HTTP/1.1" 101' in front.access_lines()[-1]


def test_browser_shows_the_page_and_the_websocket_echo(front: Appliance, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser:
        browser.open(f"https://localhost:{front.port}/")
        wait_until(
            lambda: "echo: hello through the tunnel" in browser.evaluate("document.body.innerText"),
            "the echo of the first message is on the page",
            30,
        )
        assert "It came through the proxy" in browser.evaluate("document.querySelector('h1').innerText")
        received = browser.evaluate("document.querySelector('table').innerText").lower()
        assert "x-forwarded-proto\thttps" in received
        browser.evaluate("document.getElementById('message').value = 'a second one'")
        browser.evaluate("document.querySelector('button').click()")
        wait_until(
            lambda: "echo: a second one" in browser.evaluate("document.getElementById('echoes').innerText"),
            "the echo of the second message is on the page",
        )
        assert browser.complaints == []


# -- the same by HTTP/2


def test_curl_downloads_and_uploads_by_http2(front: Appliance) -> None:
    done = curl(front, "/bytes/1000003", "--http2", "--write-out", "%{stderr}%{http_version}")
    assert (len(done.stdout), done.stderr) == (1_000_003, b"2")
    sent = os.urandom(UPLOAD_BYTES)
    head, body = echoed(curl(front, "/echo/upload", "--http2", "--upload-file", "-", stdin=sent).stdout)
    assert body == sent
    assert re.search(r"^transfer-encoding: chunked$", head, re.IGNORECASE | re.MULTILINE)
    head, body = echoed(curl(front, "/echo", "--http2", "--data-binary", "@-", stdin=sent).stdout)
    assert body == sent
    assert f"content-length: {UPLOAD_BYTES}" in head.lower()


def test_curl_reads_an_answer_that_comes_before_its_upload_has_ended(front: Appliance, tmp_path: Path) -> None:
    """The answer and the RST_STREAM behind it: curl up to 7.88 needs them in records of their own."""
    large = tmp_path / "large"
    large.write_bytes(bytes(20_000_000))
    url = f"https://localhost:{front.port}/bytes/x"
    for _ in range(5):
        done = run_curl(front, "--http2", "--data-binary", f"@{large}", "--write-out", "%{stderr}%{http_code}", url)
        assert done.stderr == b"404"


def test_nghttp_and_h2load_find_nothing_to_complain_of(front: Appliance) -> None:
    url = f"https://localhost:{front.port}/bytes/1000"
    done = subprocess.run(
        ["nghttp", "--no-verify-peer", "--stat", "--null-out", "--multiply=20", url],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" 200 ") >= 20, done.stdout
    done = subprocess.run(
        ["h2load", "-n", "1000", "-c", "4", "-m", "20", url], capture_output=True, text=True, timeout=60
    )
    assert "1000 succeeded, 0 failed, 0 errored, 0 timeout" in done.stdout, done.stdout


def test_browser_uses_http2_for_the_page_and_the_websocket(front: Appliance, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser:
        browser.open(f"https://localhost:{front.port}/")
        wait_until(
            lambda: "echo: hello through the tunnel" in browser.evaluate("document.body.innerText"),
            "the echo of the first message is on the page",
            30,
        )
        protocol = browser.evaluate("performance.getEntriesByType('navigation')[0].nextHopProtocol")
        assert protocol == "h2"
        browser.evaluate("socket.close()")
        wait_until(lambda: "Closed" in browser.evaluate("document.getElementById('state').textContent"), "the close")
        assert browser.complaints == []
    wait_until(lambda: any("/ws" in line for line in front.access_lines()), "the tunnel is logged")
    lines = "\n".join(front.access_lines())
    assert '"GET / HTTP/2.0" 200' in lines
    assert '"CONNECT /ws HTTP/2.0" 101' in lines
    assert "HTTP/1.1" not in lines
