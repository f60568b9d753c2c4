"""Sections of the page about a cycle: where it goes, what makes verify dear, when speculation pays."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from analysis.judge.verdict import SweepVerdict
from analysis.judge.verify_parts import VerifyPart, VerifyParts
from analysis.judge.what_if import Saving, StepNeed, ms_to_break_even, savings
from analysis.show import charts
from analysis.show.elements import drawing, or_dash, row_names, section, table, todays_phases
from analysis.show.wording import communication_bound, verify_parts_line


def cycle(verdict: SweepVerdict) -> str:
    """Phases of a cycle, communication, and what makes verify dear."""
    timed = [each for each in verdict.phases if each.cycle_ms is not None]
    if not timed:
        return section("Where the cycle goes", "No cycle was timed.")
    parts = [drawing(charts.phase_bars(timed, row_names(verdict), verdict.control))]
    if verdict.communication is not None:
        parts.append(f'<p class="say">{escape(communication_bound(verdict.communication))}</p>')
        parts.append("<h3>Kernel time inside verify</h3>")
        parts.append(drawing(charts.kernel_bars(verdict.communication)))
    else:
        parts.append("<p>No kernel trace, so the share of communication in verify is unknown.</p>")
    if verdict.verify_parts is not None:
        parts.append(_verify_parts(verdict.verify_parts))
    text = "A cycle is one draft, verify, extend round of the server. Without speculation it is one decode step."
    return section("Where the cycle goes", text, *parts)


def _verify_parts(found: VerifyParts) -> str:
    rows = [
        f'<td>{escape(part.kind)}<div class="why">{escape(_changed_kernel(part))}</div></td>'
        f'<td class="n">{part.decode_ms:.2f}</td><td class="n">{part.verify_ms:.2f}</td>'
        f'<td class="n">{part.extra_ms:+.2f}</td><td class="n">{or_dash(part.tok_s, 1)}</td>'
        f'<td class="n">{or_dash(part.break_even_accept_length, 2)}</td>'
        for part in found.parts
    ]
    header = ["kernels", "#decode step ms", "#verify ms", "#more ms", "#tok/s without", "#break-even without"]
    return (
        f'<h3>What makes verify dear</h3><p class="say">{escape(verify_parts_line(found))}</p>{table(header, rows)}'
        "<p>The last two columns say what this configuration would reach, and which accept length would break even, if "
        "the part took no longer in verify than in a decode step.</p>"
    )


def _changed_kernel(part: VerifyPart) -> str:
    if part.kernel == part.decode_kernel or not part.decode_kernel:
        return f"longest: {part.kernel}" if part.kernel else ""
    return f"longest in decode: {part.decode_kernel}; in verify: {part.kernel or 'none'}"


def what_if(verdict: SweepVerdict) -> str:
    """The accept length, the accuracy and the milliseconds that speculation needs."""
    title = "When speculation pays"
    needed, plain, today = verdict.break_even, verdict.speculation_pays.plain, todays_phases(verdict)
    figure = charts.accept_length_curve(verdict, row_names(verdict))
    if needed is None or figure is None or today is None or plain is None:
        return section(title, f"{verdict.break_even_reason or 'not known'}.".capitalize())
    missing_ms = ms_to_break_even(today, baseline_tok_s=plain.tok_s)
    parts = [drawing(figure)]
    if verdict.step_needs:
        parts.append("<h3>Accuracy that the drafter needs</h3>")
        parts.append(
            "<p>Accuracy is the chance that a draft token is accepted, given that all tokens before it were. It is "
            "assumed to be constant along a chain (top-k 1). " + _not_run(verdict.step_needs) + "</p>"
        )
        parts.append(_needs_table(verdict.step_needs))
    parts.append("<h3>Next milliseconds to save</h3>")
    if missing_ms is not None:
        parts.append(f"<p>{escape(_missing(missing_ms, today.accept_length))}</p>")
    rows = [
        f'<td>{saving.phase}</td><td class="n">{saving.ms:.2f} ms</td><td class="n">{saving.share:.1%}</td>'
        f'<td class="n">{"—" if saving.tok_s_1ms_less is None else f"{saving.tok_s_1ms_less:.1f}"}</td>'
        f'<td class="n">{_alone(saving, missing_ms)}</td>'
        for saving in savings(today)
    ]
    parts.append(table(["phase", "#now", "#share of cycle", "#tok/s with 1 ms less", "#alone, breaks even at"], rows))
    text = (
        f"At the cycle of {verdict.names[today.configuration_id]} ({needed.cycle_ms:.2f} ms), speculation breaks even "
        f"at an accept length of {needed.accept_length:.2f}."
    )
    return section(title, text, *parts)


def _not_run(needs: Sequence[StepNeed]) -> str:
    """What the table holds beside the step counts that were run."""
    if any(need.estimated for need in needs):
        return (
            "The cycle time of step counts that were not run is estimated by a line through the step counts that were."
        )
    if len(needs) > 1:
        return "The cycle times of the step counts that were run do not lie on a line, so no other is estimated."
    return "One step count was run, so no other is estimated."


def _needs_table(needs: Sequence[StepNeed]) -> str:
    targeted = any(need.target is not None for need in needs)
    rows = []
    for need in needs:
        cycle = f"{need.cycle_ms:.1f} ms" + (" (estimated)" if need.estimated else "")
        today = "—" if need.accept_length_today is None else f"{need.accept_length_today:.2f}"
        accuracies = [need.break_even] + ([need.target] if need.target is not None else [])
        cells = "".join(
            f'<td class="n">{each.accept_length:.2f}</td><td class="n">'
            + ("out of reach" if each.conditional_accuracy is None else f"{each.conditional_accuracy:.0%}")
            + "</td>"
            for each in accuracies
        )
        rows.append(f'<td>{need.num_steps}</td><td class="n">{cycle}</td><td class="n">{today}</td>{cells}')
    header = [
        "draft steps",
        "#cycle",
        "#accept length today",
        "#accept length to break even",
        "#accuracy to break even",
    ]
    return table(header + (["#accept length for the target", "#accuracy for the target"] if targeted else []), rows)


def _missing(missing_ms: float, accept_length: float | None) -> str:
    today = "" if accept_length is None else f" of {accept_length:.2f}"
    if missing_ms > 0:
        return f"At today's accept length{today}, the cycle must become {missing_ms:.1f} ms shorter to break even."
    return f"At today's accept length{today}, speculation pays until the cycle is {-missing_ms:.1f} ms longer."


def _alone(saving: Saving, missing_ms: float | None) -> str:
    if missing_ms is None:
        return "—"
    return f"{saving.ms - missing_ms:.2f} ms" if missing_ms < saving.ms else "not with this phase alone"
