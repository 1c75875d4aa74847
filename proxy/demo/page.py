"""The demo's page: self-contained HTML that shows a request as it arrived behind the proxy."""

from __future__ import annotations

import html
import secrets
from collections.abc import Iterable

Fields = Iterable[tuple[bytes, bytes]]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>reverse-proxy demo</title>
<link rel="icon" href="data:,">
<style nonce="{nonce}">
:root {{ color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent); }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin-bottom: .25rem; }}
h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
code, td, th, #echoes {{ font-family: ui-monospace, monospace; font-size: .9rem; }}
table {{ border-collapse: collapse; width: 100%; }}
caption {{ text-align: left; padding-bottom: .5rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-top: 1px solid var(--line); }}
th {{ font-weight: 600; white-space: nowrap; }}
td {{ overflow-wrap: anywhere; }}
form {{ display: flex; flex-wrap: wrap; gap: .5rem; align-items: end; }}
label {{ flex: 1 1 15rem; }}
input {{ display: block; width: 100%; box-sizing: border-box; font: inherit; padding: .35rem .5rem; }}
button {{ font: inherit; padding: .35rem 1rem; }}
#echoes {{ list-style: none; padding: 0; min-height: 1.5rem; }}
</style>
</head>
<body>
<main>
<h1>{headline}</h1>
<p>{explanation}</p>

<h2>What arrived here</h2>
<table>
<caption><code>{request_line}</code></caption>
<tbody>
{rows}
</tbody>
</table>

<h2>A WebSocket through the same proxy</h2>
<p id="state" role="status">Connecting to <code>/ws</code> &hellip;</p>
<form id="talk">
<label>Message <input id="message" name="message" value="hello through the tunnel" autocomplete="off"></label>
<button>Send</button>
</form>
<ol id="echoes" role="log" aria-label="Echoes"></ol>

<h2>Also here</h2>
<ul>
<li><a href="/echo?say=hello"><code>/echo</code></a>: any method, sends the request back, its body streamed</li>
<li><a href="/bytes/1000"><code>/bytes/N</code></a>: N bytes</li>
<li><a href="/slow?secs=5"><code>/slow?secs=N</code></a>: a line each half second for N seconds</li>
<li><a href="/status/418"><code>/status/NNN</code></a>: that status</li>
</ul>
</main>
<script nonce="{nonce}">
"use strict";
const state = document.getElementById("state");
const echoes = document.getElementById("echoes");
const message = document.getElementById("message");
const scheme = location.protocol === "https:" ? "wss://" : "ws://";
const socket = new WebSocket(scheme + location.host + "/ws");
const say = () => {{ if (socket.readyState === WebSocket.OPEN) socket.send(message.value); }};
socket.addEventListener("open", () => {{ state.textContent = "Open: what you send comes back."; say(); }});
socket.addEventListener("close", (event) => {{ state.textContent = "Closed (code " + event.code + ")."; }});
socket.addEventListener("message", (event) => {{
  const line = document.createElement("li");
  line.textContent = "echo: " + event.data;
  echoes.append(line);
}});
document.getElementById("talk").addEventListener("submit", (event) => {{ event.preventDefault(); say(); }});
</script>
</body>
</html>
"""


def _text(raw: bytes) -> str:
    return html.escape(raw.decode("latin-1"))


def render_page(method: bytes, target: bytes, fields: Fields) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The page and the response fields that belong to it.

    Whether the request came through a proxy is read from its ``Via`` field (RFC 9110 section 7.6.3).
    """
    fields = tuple(fields)
    via = next((value for name, value in fields if name.lower() == b"via"), None)
    if via is None:
        headline, explanation = "This request came directly", "It has no <code>Via</code> field: no proxy passed it on."
    else:
        headline = "It came through the proxy"
        explanation = (
            "Your browser spoke TLS with the proxy; the proxy sent the request on to this small embedded upstream "
            f"(<code>Via: {_text(via)}</code>)."
        )
    nonce = secrets.token_urlsafe(16)
    rows = "\n".join(f'<tr><th scope="row">{_text(n)}</th><td>{_text(v)}</td></tr>' for n, v in fields)
    page = _PAGE.format(
        nonce=nonce,
        headline=headline,
        explanation=explanation,
        request_line=_text(method + b" " + target),
        rows=rows,
    ).encode()
    policy = (
        f"default-src 'none'; img-src data:; connect-src 'self'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'"
    )
    return page, [
        (b"Content-Type", b"text/html; charset=utf-8"),
        (b"Content-Security-Policy", policy.encode()),
        (b"Cache-Control", b"no-store"),
    ]
