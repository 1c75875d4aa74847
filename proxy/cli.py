"""The command line: parses, calls, prints. Nothing is decided here."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO
from urllib.parse import urlencode

import setproctitle

from proxy import __version__
from proxy.budget import Limits, parse_limits, process_limits
from proxy.config.load import ConfigFile, admin_socket_in, load_settings
from proxy.config.place import faults_in
from proxy.config.schema import Settings
from proxy.demo.upstream import run_demo_upstream
from proxy.drill import score
from proxy.drill.run import MIN_DRILL_SECS, drill
from proxy.errors import EXIT_OK, EXIT_RUNTIME, EXIT_USAGE, ConfigError, OperatorError
from proxy.master import quickstart
from proxy.master.activation import take_inherited
from proxy.master.blackbox import black_boxes, show_black_boxes
from proxy.master.check import check
from proxy.master.crew import Helper
from proxy.master.daemonize import PidFile, daemonize, require_log_files, run_again
from proxy.master.live import LiveLine
from proxy.master.status_client import ask, fetch_status, look, show_reload, show_status
from proxy.master.stop import stop
from proxy.master.supervisor import Supervisor
from proxy.master.tables import show_budget, show_level, show_why
from proxy.master.upgrade import Handover, take_over
from proxy.observe.blackbox import folder_of
from proxy.observe.record import LEVELS
from proxy.usage import require_command_first, require_known_options
from proxy.worker.main import run_worker

PROGRAM = "reverse-proxy"
EXIT_INTERRUPTED = 130
_OUTPUT_FAULTS = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT})

_DEMO_TEXT = """\
reverse-proxy {version}: HTTPS in front of an embedded upstream. Ctrl-C ends it.

  https://localhost:{port}/         a page (the certificate is self-signed: a browser asks once)
  http://localhost:{redirect_port}/          redirects there
  http://127.0.0.1:{health_port}/readyz    health

Try:
  curl -k https://localhost:{port}/
  curl -i http://localhost:{redirect_port}/
  curl http://127.0.0.1:{health_port}/readyz
  head -c 100000000 /dev/zero | curl -k -T - https://localhost:{port}/echo | wc -c
  WebSocket: wss://localhost:{port}/ws (the page has a box for it)
  {program} status --socket {socket}

Access log: {access_log}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 good, 1 a fault of this host or moment, 2 usage or configuration."""
    _secure_standard_descriptors()
    # It finds the memory of the title beside the environment's first variable: before one of those is taken out.
    setproctitle.getproctitle()
    try:
        options = _options(sys.argv[1:] if arguments is None else arguments)
        status: int = options.command(options)
        sys.stdout.flush()
    except OperatorError as error:
        _complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output is gone; the interpreter's own flush at exit must not complain about it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_RUNTIME
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in _OUTPUT_FAULTS:
            raise
        _complain(f"cannot write the output: {error.strerror}")
        return EXIT_RUNTIME
    else:
        return status


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser, commands = _parser()
    require_command_first(PROGRAM, commands, arguments)
    if arguments and arguments[0] in commands:
        command = commands[arguments[0]]
        require_known_options(arguments[0], _option_names(command), command.format_usage(), arguments[1:])
    return parser.parse_args(arguments)


def _option_names(parser: argparse.ArgumentParser) -> set[str]:
    # argparse shows them nowhere else.
    return set(parser._option_string_actions)


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands by name."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="A TLS-terminating reverse proxy.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="serve a configuration file", allow_abbrev=False)
    run.add_argument("--config", required=True, metavar="FILE")
    run.add_argument("--validate", action="store_true", help="check only, as the command `check` does")
    run.add_argument("--daemon", action="store_true", help="in the background, once it is ready")
    run.add_argument("--pid-file", metavar="PATH", help="of the daemon; locked, so that there is one")
    run.set_defaults(command=_run, nofile=None, json=False)

    checking = commands.add_parser("check", help="judge a configuration file; binds no port", allow_abbrev=False)
    checking.add_argument("--config", required=True, metavar="FILE")
    checking.add_argument(
        "--nofile",
        type=_limits,
        metavar="SOFT[:HARD]",
        help="judge against these descriptor limits instead of the shell's own; `unlimited` is accepted",
    )
    checking.add_argument("--json", action="store_true", help="for programs")
    checking.set_defaults(command=_check)

    serve = commands.add_parser("serve", help="a proxy in one line, without a file", allow_abbrev=False)
    serve.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="UPSTREAM",
        help="HOST:PORT, http(s)://HOST[:PORT] or unix:/PATH",
    )
    serve.add_argument("--listen", action="append", metavar="[ADDRESS]:PORT", help="default :8443, all addresses")
    serve.add_argument("--host", action="append", default=[], metavar="NAME", help="default: any")
    serve.add_argument(
        "--redirect", action="append", default=[], metavar="[ADDRESS]:PORT", help="plain HTTP; default off"
    )
    serve.add_argument("--health", metavar="ADDRESS:PORT", help="health endpoint; default off")
    serve.set_defaults(command=_serve)

    demo = commands.add_parser("demo", help="try it: HTTPS on localhost with an embedded upstream", allow_abbrev=False)
    demo.add_argument("--port", type=_port, default=8443)
    demo.add_argument("--redirect-port", type=_port, default=8080)
    demo.add_argument("--health-port", type=_port, default=9900)
    demo.set_defaults(command=_demo)

    status = commands.add_parser("status", help="what a running instance says about itself", allow_abbrev=False)
    _ask_where(status)
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(command=_status)

    reload = commands.add_parser(
        "reload", help="switch a running instance to its configuration file, or change nothing", allow_abbrev=False
    )
    _ask_where(reload)
    reload.add_argument("--dry-run", action="store_true", help="say what would change, or why it would be refused")
    reload.add_argument(
        "--confirm",
        type=_secs,
        metavar="SECS",
        help="go back by itself unless `confirm` comes within this time (60, or 60s)",
    )
    reload.add_argument("--json", action="store_true", help="for programs")
    reload.set_defaults(command=_reload)

    confirm = commands.add_parser("confirm", help="keep what `reload --confirm` switched to", allow_abbrev=False)
    _ask_where(confirm)
    confirm.add_argument("--json", action="store_true", help="for programs")
    confirm.set_defaults(command=_confirm)

    upgrade = commands.add_parser(
        "upgrade",
        help="have a new master, from the code and configuration now on disk, take over without a dropped connection",
        allow_abbrev=False,
    )
    _ask_where(upgrade)
    upgrade.add_argument("--json", action="store_true", help="for programs")
    upgrade.set_defaults(command=_upgrade)

    draining = commands.add_parser("drain", help="have a running instance drain; returns at once", allow_abbrev=False)
    _ask_where(draining)
    draining.add_argument("--json", action="store_true", help="for programs")
    draining.set_defaults(command=_drain)

    stopping = commands.add_parser("stop", help="drain a running instance and wait for its end", allow_abbrev=False)
    _ask_where(stopping)
    stopping.set_defaults(command=_stop)

    budget = commands.add_parser("budget", help="who holds and may need how many descriptors", allow_abbrev=False)
    _ask_where(budget)
    budget.add_argument("--json", action="store_true", help="for programs")
    budget.set_defaults(command=_budget)

    drilling = commands.add_parser(
        "drill", help="play an overload on a copy of the configuration, on loopback, and judge it", allow_abbrev=False
    )
    _ask_where(drilling)
    drilling.add_argument(
        "--for", dest="secs", type=_drill_secs, default=30.0, metavar="SECS", help="both rounds together; default 30s"
    )
    drilling.add_argument("--json", action="store_true", help="for programs")
    drilling.set_defaults(command=_drill)

    level = commands.add_parser("log-level", help="the event log's level, shown or changed", allow_abbrev=False)
    level.add_argument("level", nargs="?", choices=list(LEVELS), metavar="LEVEL", help=" ".join(LEVELS))
    _ask_where(level)
    level.add_argument("--json", action="store_true", help="for programs")
    level.set_defaults(command=_log_level)

    boxes = commands.add_parser(
        "blackbox", help="what was recorded when a worker ran out of something", allow_abbrev=False
    )
    _ask_where(boxes)
    boxes.add_argument("--json", action="store_true", help="for programs")
    boxes.set_defaults(command=_blackbox)

    why = commands.add_parser("why", help="the last refused or cut connections, with the reason", allow_abbrev=False)
    why.add_argument("address", nargs="?", type=_address, metavar="ADDRESS", help="only of this client")
    _ask_where(why)
    why.add_argument("--json", action="store_true", help="for programs")
    why.set_defaults(command=_why)
    return parser, commands.choices


def _ask_where(command: argparse.ArgumentParser) -> None:
    where = command.add_mutually_exclusive_group()
    where.add_argument("--config", metavar="FILE", help="of the instance to ask")
    where.add_argument("--socket", metavar="PATH", help="admin socket of the instance to ask")


def _run(options: argparse.Namespace) -> int:
    if options.validate:
        return _check(options)
    if options.pid_file is not None and not options.daemon:
        raise ConfigError("--pid-file is the daemon's: it needs --daemon")
    handover = take_over(os.environ)
    try:
        with faults_in(options.config):
            return _run_or_take_over(options, handover)
    except OperatorError as error:
        if handover is not None:
            handover.tell_failed(str(error))
        raise


def _run_or_take_over(options: argparse.Namespace, handover: Handover | None) -> int:
    folder = os.getcwd()  # the daemon's working directory is another
    path = os.path.abspath(options.config)
    load = ConfigFile(path, _load_for_daemon if options.daemon else load_settings)
    settings = load()
    # They are meant for this process, not for the one that it may fork.
    inherited = take_inherited(os.environ) if handover is None else handover.inherited

    def supervise(on_ready: Callable[[], None], pid_file: PidFile | None) -> int:
        return Supervisor(
            settings,
            run_worker,
            load=load,
            inherited=inherited,
            handover=handover,
            on_ready=on_ready,
            pid_file=pid_file,
            folder=folder,
        ).run()

    if not options.daemon:
        return supervise(lambda: None, None)
    pid_file = None if options.pid_file is None else os.path.abspath(options.pid_file)
    if handover is not None:
        return run_again(supervise, pid_file=pid_file, lock=handover.pid_file)
    return daemonize(
        supervise,
        pid_file=pid_file,
        core_dumps=settings.core_dumps,
        keep=[sock.fileno() for sock in inherited.sockets.values()],
    )


def _load_for_daemon(path: str) -> Settings:
    settings = load_settings(path)
    require_log_files(settings)
    return settings


def _check(options: argparse.Namespace) -> int:
    report = check(options.config, options.nofile or process_limits())
    text = json.dumps(report.to_dict(), indent=2) if options.json else report.to_text()
    if text:
        print(text)
    for error in report.errors:
        _complain(error)
    return EXIT_USAGE if report.errors else EXIT_OK


def _serve(options: argparse.Namespace) -> int:
    settings = quickstart.serve_settings(
        to=options.to,
        listen=options.listen or [":8443"],
        hosts=options.host,
        redirect=options.redirect,
        health=options.health,
        environ=os.environ,
    )
    quickstart.make_private_folder(settings.state_dir)
    with quickstart.faults_of_options("serve", quickstart.SERVE_OPTIONS):
        return Supervisor(settings, run_worker, inherited=take_inherited(os.environ)).run()


def _demo(options: argparse.Namespace) -> int:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as upstream:
        settings = quickstart.demo_settings(
            port=options.port,
            redirect_port=options.redirect_port,
            health_port=options.health_port,
            upstream_port=upstream.getsockname()[1],
            environ=os.environ,
        )
        quickstart.make_private_folder(settings.state_dir)
        text = _DEMO_TEXT.format(
            version=__version__,
            program=PROGRAM if shutil.which(PROGRAM) else _shown_program(),
            port=options.port,
            redirect_port=options.redirect_port,
            health_port=options.health_port,
            socket=settings.admin.socket,
            access_log=settings.access_log.path,
        )

        def serve_upstream() -> int:
            run_demo_upstream(upstream)
            return EXIT_OK

        with quickstart.faults_of_options("demo", quickstart.DEMO_OPTIONS):
            return Supervisor(
                settings,
                run_worker,
                helpers=[Helper("demo upstream", serve_upstream, upstream)],
                on_ready=lambda: print(text, flush=True),
                live=(lambda permits: LiveLine(sys.stdout, permits)) if sys.stdout.isatty() else None,
            ).run()


def _shown_program() -> str:
    """How this program can be called again from here."""
    return os.path.relpath(sys.argv[0]) if os.path.basename(sys.argv[0]) == PROGRAM else f"{sys.executable} -m proxy"


def _status(options: argparse.Namespace) -> int:
    return _show(options, fetch_status(_admin_sockets(options)), show_status)


def _budget(options: argparse.Namespace) -> int:
    return _show(options, look(_admin_sockets(options), "/budget"), show_budget)


def _why(options: argparse.Namespace) -> int:
    target = "/why" if options.address is None else f"/why?{urlencode({'address': options.address})}"
    return _show(options, look(_admin_sockets(options), target), show_why)


def _blackbox(options: argparse.Namespace) -> int:
    # With a file it needs nobody who answers: the records are for the time after, too.
    if options.config is not None:
        folder = folder_of(load_settings(options.config).state_dir)
    else:
        folder = str(fetch_status(_admin_sockets(options))["black_box"])
    return _show(options, black_boxes(folder), show_black_boxes)


def _log_level(options: argparse.Namespace) -> int:
    paths = _admin_sockets(options)
    if options.level is None:
        return _show(options, look(paths, "/log-level"), show_level)
    return _show(options, ask(paths, "/log-level", {"level": options.level}), show_level)


def _show(options: argparse.Namespace, document: dict[str, Any], show: Callable[[dict[str, Any], TextIO], None]) -> int:
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        show(document, sys.stdout)
    return EXIT_OK


def _reload(options: argparse.Namespace) -> int:
    query = {"dry_run": "1" if options.dry_run else "0"}
    if options.confirm is not None:
        query["confirm_secs"] = str(options.confirm)
    sockets = _admin_sockets(options)
    if options.config is not None:
        _require_its_file(sockets, options.config)
    return _tell_reload(ask(sockets, "/reload", query), options)


def _require_its_file(sockets: list[str], path: str) -> None:
    """An instance reloads the file that it was started with. Raises ConfigError when that is not ``path``."""
    own = fetch_status(sockets).get("config")
    if own is not None and not (os.path.exists(own) and os.path.samefile(own, path)):
        raise ConfigError(
            f"the instance that answers was started with {own} and reloads that file, not {path}: "
            f"change that one, or name it with --config"
        )


def _confirm(options: argparse.Namespace) -> int:
    document = ask(_admin_sockets(options), "/confirm", {})
    # Nothing waits: neither the command line nor a configuration is at fault.
    return EXIT_RUNTIME if _tell_reload(document, options) else EXIT_OK


def _upgrade(options: argparse.Namespace) -> int:
    document = ask(_admin_sockets(options), "/upgrade", {})
    if options.json:
        print(json.dumps(document, indent=2))
    elif "pid" in document:
        print(f"{document['result']}: pid {document['pid']} serves; the old generation ends with its connections")
    for error in document.get("errors", ()):
        _complain(str(error))
    return EXIT_RUNTIME if document["result"] == "refused" else EXIT_OK


def _drain(options: argparse.Namespace) -> int:
    document = ask(_admin_sockets(options), "/drain", {})
    if options.json:
        print(json.dumps(document, indent=2))
    elif "pid" in document:
        print(f"{PROGRAM} (pid {document['pid']}) drains")
    for error in document.get("errors", ()):
        _complain(str(error))
    return EXIT_RUNTIME if document["result"] == "refused" else EXIT_OK


def _tell_reload(document: dict[str, Any], options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        show_reload(document, sys.stdout)
    for error in document.get("errors", ()):
        _complain(str(error))
    return EXIT_USAGE if document["result"] == "refused" else EXIT_OK


def _drill(options: argparse.Namespace) -> int:
    path = options.config
    if path is None:
        path = fetch_status(_admin_sockets(options)).get("config")
        if path is None:
            raise ConfigError("the instance that answers has no configuration file: name one with --config")
    settings = load_settings(path)
    with faults_in(path):
        rounds = drill(settings, run_worker, secs=options.secs, say=lambda text: print(text, file=sys.stderr))
    faults = [fault for one in rounds for fault in score.missed(one, settings.drill)]
    if options.json:
        print(json.dumps(score.to_dict(rounds, faults), indent=2))
    else:
        score.show(rounds, faults, sys.stdout)
    return EXIT_RUNTIME if faults else EXIT_OK


def _stop(options: argparse.Namespace) -> int:
    stop(_admin_sockets(options), sys.stdout)
    return EXIT_OK


def _admin_sockets(options: argparse.Namespace) -> list[str]:
    """Where to ask: as told, else wherever an instance of this user may answer."""
    if options.socket is not None:
        return [options.socket]
    if options.config is not None:
        return [admin_socket_in(options.config)]
    return quickstart.admin_sockets(os.environ)


def _secure_standard_descriptors() -> None:
    """Open what was closed on /dev/null: the next socket would get its number, and log lines would go to a client."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _complain(message: str) -> None:
    print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)


def _secs(text: str) -> float:
    try:
        secs = float(text.removesuffix("s"))
    except ValueError:
        secs = 0.0
    if not 1 <= secs <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r}: a time from 1 to 86400 seconds is wanted, such as 60 or 60s")
    return secs


def _drill_secs(text: str) -> float:
    secs = _secs(text)
    if secs < MIN_DRILL_SECS:
        raise argparse.ArgumentTypeError(f"{text!r}: a drill shorter than {MIN_DRILL_SECS:g} s proves nothing")
    return secs


def _limits(text: str) -> Limits:
    try:
        return parse_limits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IP address") from None


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 1 to 65535")
    return int(text)
