"""Real programs that the tests start themselves: the demo's upstream, git's http-backend, a browser."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.harness.processes import alive, descendants, wait_until

END_TIMEOUT_SECS = 10.0
SYSTEM_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"  # Debian's fcgiwrap and nginx are there
GIT_HTTP_BACKEND = "/usr/lib/git-core/git-http-backend"
NGINX_FASTCGI_PARAMS = "/etc/nginx/fastcgi_params"

SERVE_DEMO = """
import socket, sys
from proxy.demo.upstream import run_demo_upstream
run_demo_upstream(socket.socket(fileno=int(sys.argv[1])))
"""

NGINX_CONFIG = """
{user}
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    fastcgi_temp_path {folder}/fastcgi;
    proxy_temp_path {folder}/proxy;
    scgi_temp_path {folder}/scgi;
    uwsgi_temp_path {folder}/uwsgi;
    server {{
        listen unix:{listen};
        client_max_body_size 0;
        location ~ ^(/.*)$ {{
            include {params};
            fastcgi_param SCRIPT_FILENAME {backend};
            fastcgi_param GIT_HTTP_EXPORT_ALL "";
            fastcgi_param GIT_PROJECT_ROOT {root};
            fastcgi_param PATH_INFO $1;
            fastcgi_request_buffering off;
            fastcgi_buffering off;
            fastcgi_pass unix:{fcgi};
        }}
    }}
}}
"""


@contextlib.contextmanager
def program(command: list[str], output: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program, its output in a file; ends it and whatever it started, by pid."""
    with output.open("ab") as log:
        path = shutil.which(command[0], path=SYSTEM_PATH)
        assert path is not None, f"{command[0]} is missing: .ci/setup test names its Debian package"
        process = subprocess.Popen([path, *command[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options)
    try:
        yield process
    finally:
        family = descendants(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_SECS)
        process.kill()
        process.wait()
        for pid in family:
            if alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)


@dataclass(frozen=True)
class Demo:
    """The demo's upstream in a process of its own; ``output`` is what it printed."""

    port: int
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def url(self) -> str:
        """What the configuration takes as an upstream."""
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def demo_upstream(output: Path) -> Iterator[Demo]:
    """Runs ``proxy.demo.upstream``; asserts that SIGTERM ends it with exit code 0."""
    with contextlib.ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            port: int = listener.getsockname()[1]
            command = [sys.executable, "-c", SERVE_DEMO, str(listener.fileno())]
            process = stack.enter_context(program(command, output, pass_fds=[listener.fileno()]))
        yield Demo(port, process, output)
        process.terminate()
        assert process.wait(END_TIMEOUT_SECS) == 0, output.read_text()


@contextlib.contextmanager
def git_http_backend(root: Path, folder: Path) -> Iterator[str]:
    """Serves the bare repositories below ``root`` by git's own http-backend behind nginx and fcgiwrap.

    Yields the upstream's URL, a Unix socket. Logs and temporary files are in ``folder``.
    """
    sockets = Path(tempfile.mkdtemp(prefix="rp-"))  # a Unix socket's path must be short
    listen, fcgi = sockets / "nginx.sock", sockets / "fcgi.sock"
    config = folder / "nginx.conf"
    config.write_text(
        NGINX_CONFIG.format(
            user="user root;" if os.getuid() == 0 else "",
            folder=folder,
            listen=listen,
            params=NGINX_FASTCGI_PARAMS,
            backend=GIT_HTTP_BACKEND,
            root=root,
            fcgi=fcgi,
        )
    )
    try:
        with (
            program(["fcgiwrap", "-f", "-c", "1", "-s", f"unix:{fcgi}"], folder / "fcgiwrap.log"),
            program(["nginx", "-e", "stderr", "-c", str(config)], folder / "nginx.log"),
        ):
            wait_until(fcgi.exists, "fcgiwrap is up")
            wait_until(lambda: _accepts(listen), "nginx listens")
            yield f"unix:{listen}"
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(str(path)) == 0


@dataclass
class Browser:
    """A page of headless Chromium, driven over its DevTools protocol."""

    connection: ClientConnection
    complaints: list[str] = field(default_factory=list)
    """What the page's console and the browser's log said at level error."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        number = next(self._numbers)
        self.connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.connection.recv(timeout=30))
            if message.get("id") == number:
                assert "result" in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        match message:
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error", "text": text}}}:
                self.complaints.append(text)
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(json.dumps(details))

    def open(self, url: str) -> None:
        """Goes to ``url``; returns when the page has loaded."""
        result = self.command("Page.navigate", url=url)
        assert "errorText" not in result, result
        wait_until(lambda: self.evaluate("document.readyState") == "complete", "the page has loaded", 30)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Headless Chromium with a new profile in ``folder``, certificates unverified, talking to nobody by itself."""
    profile = folder / "chromium"
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--ignore-certificate-errors",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    with program(command, folder / "chromium.log"):
        chosen = profile / "DevToolsActivePort"
        wait_until(lambda: chosen.exists() and len(chosen.read_text().split()) == 2, "Chromium is up", 60)
        port, path = chosen.read_text().split()
        options: dict[str, Any] = {"proxy": None, "max_size": None}
        with connect(f"ws://127.0.0.1:{port}{path}", **options) as whole:
            target = Browser(whole).command("Target.createTarget", url="about:blank")["targetId"]
            with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", **options) as page:
                browser = Browser(page)
                for domain in ("Page", "Runtime", "Log"):
                    browser.command(f"{domain}.enable")
                yield browser
