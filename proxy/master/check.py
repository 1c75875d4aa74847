"""`reverse-proxy check`: everything that `run` would judge, every fault at once, without binding a port."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.budget import Budget, Limits, to_dict, to_text
from proxy.config.checks import nobody_is_served
from proxy.config.load import load_settings
from proxy.config.place import told
from proxy.errors import OperatorError
from proxy.master.admin_socket import require_socket_or_nothing
from proxy.master.logfiles import require_logs
from proxy.master.memory import MemoryBudget, memory_budget
from proxy.master.plan import load_tls, make_plan, require_budget, require_state_dir
from proxy.master.privileges import ignored, plan_privileges


@dataclass(frozen=True, slots=True)
class Report:
    """``budget`` is None when the file itself is not acceptable."""

    path: str
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    budget: Budget | None
    memory: MemoryBudget | None = None

    def to_dict(self) -> Mapping[str, object]:
        return {
            "path": self.path,
            "ok": not self.errors,
            "errors": list(self.errors),
            "warnings": list(self.warnings),
            "budget": None if self.budget is None else to_dict(self.budget),
            "memory": None if self.memory is None else self.memory.to_dict(),
        }

    def to_text(self) -> str:
        """The arithmetic, warnings and verdict; the errors are the caller's to print."""
        lines = [] if self.budget is None else [to_text(self.budget)]
        lines += [] if self.memory is None else [self.memory.to_text()]
        lines += [f"warning: {warning}" for warning in self.warnings]
        if not self.errors:
            lines.append(f"{self.path}: good")
        return "\n".join(lines)


def check(path: str, limits: Limits) -> Report:
    """Judge the configuration file at ``path`` for a process under ``limits``."""
    try:
        settings = load_settings(path)
        plan = make_plan(settings, limits)
    except OperatorError as error:
        return Report(path, tuple(str(error).split("\n")), (), None)
    errors: list[str] = []
    memory = memory_budget(settings, plan.budget)
    warnings = [*nobody_is_served(settings), *plan.listen.skipped, *memory.warnings]

    def judge(part: Callable[[], object]) -> None:
        try:
            part()
        except OperatorError as error:
            errors.extend(told(error, path))

    def tls() -> None:
        loaded = load_tls(plan, store=False).listeners
        warnings.extend(warning for one in loaded for warning in one.warnings)
        warnings.extend(
            f"listener {where.address} has no certificate: it serves a self-signed one, which clients do not trust"
            for where, one in zip(plan.listen.https, loaded, strict=True)
            if one.self_signed
        )

    def user() -> None:
        require_logs(settings, plan_privileges(settings))
        warnings.extend(filter(None, [ignored(settings)]))

    judge(lambda: require_budget(plan.budget))
    judge(user)
    judge(lambda: require_state_dir(settings, plan.listen))
    judge(lambda: require_socket_or_nothing(settings.admin.socket))
    judge(tls)
    return Report(path, tuple(errors), tuple(warnings), plan.budget, memory)
