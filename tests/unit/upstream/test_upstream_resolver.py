"""Names of backends are resolved at start and again; what fails leaves the last addresses in use."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from proxy.config.upstream_address import parse_upstream
from proxy.upstream.backend import Backend
from proxy.upstream.resolve import Resolver

Answer = list[str] | OSError


class FakeLoop:
    """``asyncio``'s loop but for getaddrinfo, whose answers the test gives in turn, the last one again and again."""

    def __init__(self, **answers: list[Answer]) -> None:
        self._answers = answers
        self.asked: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)

    async def getaddrinfo(self, host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        self.asked.append((host, port))
        answers = self._answers[host.partition(".")[0]]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in answer]


class Reports:
    def __init__(self) -> None:
        self.signatures: list[str] = []

    def report(self, signature: str, message: str, **_: object) -> None:
        self.signatures.append(signature)


def backend(url: str) -> Backend:
    return Backend(parse_upstream(url), max_fails=1, fail_timeout_secs=1, tls=None, server_name=None)


def addresses(one: Backend) -> list[object]:
    return [endpoint.address[0] for endpoint in one.endpoints]


def resolver(loop: FakeLoop, backends: list[Backend], reports: Reports, interval_secs: float = 600) -> Resolver:
    return Resolver(loop, backends, interval_secs=interval_secs, reporter=reports)  # type: ignore[arg-type]


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  the resolver has nothing to tell it by
            await asyncio.sleep(0)


def test_start_resolves_each_name_once_and_takes_every_address() -> None:
    async def main() -> None:
        loop = FakeLoop(git=[["192.0.2.1", "2001:db8::1", "192.0.2.1"]])
        backends = [backend("http://git.example.org:3000"), backend("http://git.example.org:3000")]
        one = resolver(loop, backends, Reports())
        await one.start()
        one.stop()
        assert loop.asked == [("git.example.org", 3000)]
        for each in backends:
            assert addresses(each) == ["192.0.2.1", "2001:db8::1"]
            assert [endpoint.family for endpoint in each.endpoints] == [socket.AF_INET, socket.AF_INET6]

    asyncio.run(main())


def test_names_are_resolved_again_without_a_reload() -> None:
    async def main() -> None:
        loop = FakeLoop(git=[["192.0.2.1"], ["192.0.2.2"]])
        one = backend("http://git.example.org:3000")
        running = resolver(loop, [one], Reports(), interval_secs=0.01)
        await running.start()
        assert addresses(one) == ["192.0.2.1"]
        await until(lambda: addresses(one) == ["192.0.2.2"])
        running.stop()

    asyncio.run(main())


def test_a_name_that_no_longer_resolves_keeps_its_addresses_and_is_reported() -> None:
    async def main() -> None:
        loop = FakeLoop(git=[["192.0.2.1"], socket.gaierror(socket.EAI_AGAIN, "try again"), ["192.0.2.3"]])
        one, reports = backend("http://git.example.org:3000"), Reports()
        running = resolver(loop, [one], reports, interval_secs=0.01)
        await running.start()
        await until(lambda: reports.signatures)
        assert addresses(one) == ["192.0.2.1"]
        await until(lambda: addresses(one) == ["192.0.2.3"])
        running.stop()
        assert reports.signatures == ["upstream.resolve_failed:git.example.org"]

    asyncio.run(main())


def test_a_name_that_does_not_resolve_at_start_does_not_keep_the_others_from_it() -> None:
    async def main() -> None:
        loop = FakeLoop(bad=[socket.gaierror(socket.EAI_NONAME, "unknown")], good=[["192.0.2.1"]])
        bad, good = backend("http://bad.example.org:80"), backend("http://good.example.org:80")
        running = resolver(loop, [bad, good], Reports())
        await running.start()
        running.stop()
        assert (addresses(bad), addresses(good)) == ([], ["192.0.2.1"])
        assert bad.next_endpoint() is None

    asyncio.run(main())


def test_addresses_and_sockets_are_never_asked_for() -> None:
    async def main() -> None:
        loop = FakeLoop()
        backends = [backend("http://192.0.2.1:80"), backend("http://[2001:db8::1]:80"), backend("unix:/run/up.sock")]
        running = resolver(loop, backends, Reports())
        await running.start()
        running.stop()
        assert loop.asked == []
        assert [each.endpoints[0].address for each in backends] == [
            ("192.0.2.1", 80),
            ("2001:db8::1", 80, 0, 0),
            "/run/up.sock",
        ]

    asyncio.run(main())
